"""Answers whose KV goes back to the worker that computed the prompt, in a whole cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvferry.config import KvReturn, SchedulerConfig
from tests.support.digest_cluster import digest_cluster, digest_config
from tests.support.digest_model import VOCAB, answer
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from kvferry.config import ClusterConfig
    from tests.support.in_process_cluster import InProcessCluster

TURNS, USER_TOKENS, ANSWER_TOKENS = 5, 11, 23


def _config(page_size: int, policy: KvReturn, slots: int = 1024) -> ClusterConfig:
    config = digest_config(page_size, slots, scheduler=SchedulerConfig())
    return replace(config, handoff=replace(config.handoff, kv_return=policy))


def _returned(cluster: InProcessCluster, number: int) -> None:
    """Wait for the end of the `number`th return."""
    prefill, decode = (worker.snapshot for worker in cluster.workers)
    wait_until(
        f"return {number}",
        lambda: (
            prefill().counters.get("sink_adopted", 0) == number
            and decode().counters.get("source_closed", 0) == number
        ),
        5.0,
        state=lambda: (prefill().counters, decode().counters),
    )


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_only_what_the_user_says_is_computed(page_size):
    random = np.random.default_rng(3)
    tokens: list[int] = []
    hits = []
    with digest_cluster(_config(page_size, KvReturn.ALWAYS)) as made:
        for turn in range(1, TURNS + 1):
            known = len(tokens)
            tokens += random.integers(10, VOCAB, USER_TOKENS).tolist()
            said = made.generate(tokens, ANSWER_TOKENS)
            assert list(said.token_ids) == answer(tokens, ANSWER_TOKENS)
            usage = said.finish.usage
            # All but the last token of the answer, in whole pages: nobody has computed that one.
            cached = max(0, known - 1) // page_size * page_size
            assert usage.prefill_hit_tokens == cached
            assert usage.decode_hit_tokens == cached
            hits.append(usage.prefill_hit_tokens)
            tokens += said.token_ids
            _returned(made, turn)
        made.wait_idle(10)
    assert hits[-1] > 2 * ANSWER_TOKENS
