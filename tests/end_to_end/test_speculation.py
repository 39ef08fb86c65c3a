"""Drafts by n-grams with the real model, over a handoff: the answers of `transformers`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer

from kvferry.config import load_config
from kvferry.membership import Role
from tests.support.in_process_cluster import InProcessCluster
from tests.support.reference import Reference, divergence

if TYPE_CHECKING:
    from pathlib import Path

TEXT = "The ferry leaves at nine. The captain counts the crates, and the crates are full of keys."
PLAIN = "Name three things that float, and say why each of them does."
SETTINGS = {"speculation.ngram.max_draft": "3", "cache.audit": "true"}


@pytest.mark.parametrize(
    ("texts", "new_tokens"),
    [
        ([f"{TEXT}\n{TEXT}\n{TEXT}\n"], 20),
        pytest.param(
            [f"{TEXT}\n{TEXT}\n", f"Repeat this: {TEXT}\n\n{TEXT}", PLAIN, f"{PLAIN}\n{PLAIN}"],
            96,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["one", "several"],
)
def test_greedy_equals_transformers(
    texts: list[str], new_tokens: int, model_directory: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(model_directory / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in texts]
    reference = Reference(model_directory)
    expected = [reference.greedy(prompt, new_tokens) for prompt in prompts]
    config = load_config(None, {}, SETTINGS)
    with InProcessCluster(config, (Role.PREFILL, Role.DECODE)) as cluster:
        answers = cluster.generate_all(prompts, new_tokens, at_once=len(prompts))
        cluster.wait_idle(within_s=20)
        counters = cluster.counters()
    for text, got, wanted in zip(texts, answers, expected, strict=True):
        difference = divergence(text, got.token_ids, wanted)
        assert difference is None or difference.is_tie
    # The prompt of the first goes on as it began: most of it is guessed, three tokens a step.
    assert counters["draft_tokens_accepted"] >= new_tokens // 2
    assert counters["draft_tokens"] >= counters["draft_tokens_accepted"]
