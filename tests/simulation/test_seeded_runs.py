"""Seeded runs of whole workers against loss, death, refusal, abort, doubling and delay."""

from __future__ import annotations

from collections import Counter

from tests.support.sim_run import SimRun

RUNS = 200


def test_seeded_runs_hold_every_property():
    happened: Counter[str] = Counter()
    for seed in range(RUNS):
        run = SimRun(seed)
        try:
            run.run()
        except Exception as error:
            moves = " | ".join(run.trace[-40:])
            replay = f"python -m tests.simulation --seed {seed} --verbose"
            raise AssertionError(f"{replay}: {error!r} after {moves}") from error
        happened += run.happened
    # The runs reach each kind of end and of fault, so that the properties were tried at all.
    for what in ("sink_adopted", "sink_aborted", "source_closed", "source_aborted"):
        assert happened[what] > RUNS / 2, what
    for what in ("chunks_dropped", "late_messages", "duplicate_messages", "sink_busy"):
        assert happened[what] > 2, what
    for fault in ("abort", "break", "lose", "crash", "restart", "freeze", "stale", "double"):
        assert happened[f"move {fault}"] > 2, fault


def test_a_seed_replays():
    first, second = SimRun(42), SimRun(42)
    first.run()
    second.run()
    assert first.trace == second.trace
