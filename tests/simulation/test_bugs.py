"""The simulator finds seeded bugs. All of them are tried by `make sim-long`."""

from __future__ import annotations

import pytest

from tests.mutants.protocol_mutants import PROTOCOL_MUTANTS
from tests.simulation.bugs import find_all

SAMPLE = ("released-before-the-gate-is-closed", "adopted-before-it-is-there")


@pytest.mark.parametrize("name", SAMPLE)
def test_a_seeded_bug_is_found(name):
    (finding,) = find_all([m for m in PROTOCOL_MUTANTS if m.name == name], runs_max=100)
    assert finding.runs is not None, finding.what
    assert finding.what.startswith("Violation: P"), finding.what


@pytest.mark.slow
def test_every_seeded_bug_is_found():
    lost = [str(finding) for finding in find_all(PROTOCOL_MUTANTS) if finding.runs is None]
    assert not lost
