"""Seeded runs of a source and a sink core against delay, doubling, loss, refusal and abort."""

from __future__ import annotations

from collections import Counter

from tests.support.handoff_simulation import Simulation

RUNS = 3000


def test_seeded_runs_hold_every_property():
    outcomes: Counter[tuple[str, str]] = Counter()
    for seed in range(RUNS):
        simulation = Simulation(seed)
        try:
            simulation.run()
        except Exception as error:
            moves = " ".join(simulation.trace[-40:])
            raise AssertionError(f"seed {seed}: {error!r} after {moves}") from error
        if simulation.frozen is None:
            outcomes[simulation.source.ends[0], simulation.sink.ends[0]] += 1
        else:
            outcomes["frozen", simulation.frozen] += 1
    # The runs reach each kind of end, so that the properties were tried at all.
    assert outcomes["closed", "adopted"] > RUNS / 4
    assert outcomes["cancelled", "own abort"] > RUNS / 100
    assert outcomes["own abort", "failed"] > RUNS / 100
    assert outcomes["cancelled", "failed"] > RUNS / 100
    assert outcomes["frozen", "source"] > RUNS / 100
    assert outcomes["frozen", "sink"] > RUNS / 100


def test_a_seed_replays():
    first, second = Simulation(42), Simulation(42)
    first.run()
    second.run()
    assert first.trace == second.trace
