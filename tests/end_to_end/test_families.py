"""Every family through prefill and decode workers, token for token as `transformers`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvferry.config import load_config
from kvferry.membership import Role
from tests.support.in_process_cluster import InProcessCluster
from tests.support.reference import Reference, divergence
from tests.support.small_tokenizer import write_tokenizer
from tests.support.tiny_families import FAMILIES, VOCAB, make_family

if TYPE_CHECKING:
    from pathlib import Path

ANSWER_TOKENS = 8
QUICK = {"qwen2 moe", "gemma3"}
"""Biases and experts; norms of heads and outputs, windows and ropes by layer."""


@pytest.mark.parametrize(
    "family",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES],
)
def test_greedy_equals_transformers(family: str, tmp_path: Path) -> None:
    """The decode worker has two ranks, the prefill worker one; prompts are longer than windows."""
    directory = make_family(tmp_path, family)
    write_tokenizer(directory)
    settings = {
        "model.path": str(directory),
        "model.context_length": "256",
        "workers.decode.tensor_parallel": "2",
        "cache.memory_bytes": str(4 * 2**20),
        "cache.audit": "true",
        "scheduler.chunk_tokens": "64",
    }
    draw = np.random.default_rng(3)
    prompts = [draw.integers(10, VOCAB, length).tolist() for length in (1, 17, 100)]
    reference = Reference(directory)
    with InProcessCluster(load_config(None, {}, settings), (Role.PREFILL, Role.DECODE)) as cluster:
        answers = cluster.generate_all(prompts, ANSWER_TOKENS, at_once=3)
        cluster.wait_idle()
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = reference.greedy(prompt, ANSWER_TOKENS)
        assert divergence(family, answer.token_ids, expected) is None
    assert sum(answer.finish.usage.moved_tokens for answer in answers) > 0
