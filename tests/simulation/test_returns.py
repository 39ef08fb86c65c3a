"""Seeded runs in which KV goes back and forth, against everything that the other runs have."""

from __future__ import annotations

from collections import Counter

from tests.support.sim_returns import ReturningRun

RUNS = 250


def test_returns_hold_every_property():
    happened: Counter[str] = Counter()
    for seed in range(RUNS):
        run = ReturningRun(seed)
        try:
            run.run()
        except Exception as error:
            moves = " | ".join(run.trace[-40:])
            raise AssertionError(f"seed {seed}: {error!r} after {moves}") from error
        happened += run.happened
        for worker in run.world.workers:
            for key, how in worker.sink.ends.items():
                if key.request_id.endswith("-back"):
                    happened["returned" if how == "adopted" else "not returned"] += 1
    for what in ("returned", "not returned"):
        assert happened[what] > RUNS / 20, what
    assert happened["offers_sent"] >= happened["offers_taken"] > RUNS / 5
