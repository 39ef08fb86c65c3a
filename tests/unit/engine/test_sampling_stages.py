"""Stages of sampling are compiled while nobody waits."""

from __future__ import annotations

from engine.ranking import telling
from engine.sampling_item import item_part
from engine.sampling_stages import SamplingStages


def test_an_idle_turn_compiles_one_and_a_busy_one_none() -> None:
    idle = False
    part = SamplingStages(lambda: idle)
    assert part.missing == 7
    part.tick()
    assert part.missing == 7
    idle = True
    for left in (6, 5, 4, 3, 2, 1, 0, 0):
        part.tick()
        assert part.missing == left
    # The same machine code is found again, not compiled anew.
    assert item_part() is item_part()
    assert telling().address == telling().address
