"""Anything a peer can say: the driver never raises, and gives back all KV when sessions end."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.handoff_fuzz import FuzzWorker

RUNS, MOVES = 25, 300


@pytest.mark.parametrize("wildness", [0.02, 0.3, 1.0])
def test_no_message_raises_or_keeps_kv(wildness):
    happened: Counter[str] = Counter()
    for seed in range(RUNS):
        worker = FuzzWorker(seed)
        try:
            worker.run(MOVES, wildness)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
        assert worker.driver.handoffs_open() == 0, f"seed {seed}"
        accounts = worker.kv_cache.accounts()
        assert accounts.is_idle, f"seed {seed}: {accounts}"
        worker.kv_cache.audit()
        happened += Counter(worker.driver.counters)
    assert happened["illegal_messages"] > RUNS
    if wildness > 0.1:
        assert happened["unknown_messages"] > RUNS
    else:
        # The runs also get far, so that every state was thrown at.
        assert happened["sink_adopted"] > RUNS / 2
        assert happened["source_closed"] > RUNS
        assert happened["chunks_received"] > RUNS
        assert happened["chunks_dropped"] > 0
