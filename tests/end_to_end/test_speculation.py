"""Drafts by n-grams with the real model, over a handoff: the answers without them."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
from tokenizers import Tokenizer

from engine.speculation import Drafts
from kvferry.config import load_config
from kvferry.membership import Role
from tests.support.in_process_cluster import InProcessCluster
from tests.support.reference import Reference, divergence

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from engine.scheduler import StepItem

TEXT = "The ferry leaves at nine. The captain counts the crates, and the crates are full of keys."
PLAIN = "Name three things that float, and say why each of them does."
SETTINGS = {"speculation.ngram.max_draft": "3", "cache.audit": "true"}
PAIR = (Role.PREFILL, Role.DECODE)


def _without_drafts(_: Drafts, items: Sequence[StepItem], *__: object) -> list[StepItem]:
    return list(items)


def test_an_answer_is_that_of_a_worker_without_drafts(model_directory: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model_directory / "tokenizer.json"))
    prompt, new_tokens = tokenizer.encode(f"{TEXT}\n{TEXT}\n{TEXT}\n").ids, 16
    with InProcessCluster(load_config(None, {}, SETTINGS), PAIR) as cluster:
        with patch.object(Drafts, "add", _without_drafts):
            expected = cluster.generate(prompt, new_tokens)
        assert cluster.counters()["draft_tokens"] == 0
        got = cluster.generate(prompt, new_tokens)
        cluster.wait_idle()
        counters = cluster.counters()
    assert got.token_ids == expected.token_ids
    assert got.text == expected.text
    # The prompt goes on as it began: most of it is guessed.
    assert counters["draft_tokens_accepted"] >= new_tokens // 2


@pytest.mark.slow
def test_greedy_equals_transformers(model_directory: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model_directory / "tokenizer.json"))
    texts = [f"{TEXT}\n{TEXT}\n", f"Repeat this: {TEXT}\n\n{TEXT}", PLAIN, f"{PLAIN}\n{PLAIN}"]
    prompts = [tokenizer.encode(text).ids for text in texts]
    reference = Reference(model_directory)
    expected = [reference.greedy(prompt, 96) for prompt in prompts]
    with InProcessCluster(load_config(None, {}, SETTINGS), PAIR) as cluster:
        answers = cluster.generate_all(prompts, 96, at_once=len(prompts))
        cluster.wait_idle()
        assert cluster.counters()["draft_tokens_accepted"] > 96
    for text, got, wanted in zip(texts, answers, expected, strict=True):
        difference = divergence(text, got.token_ids, wanted)
        assert difference is None or difference.is_tie
