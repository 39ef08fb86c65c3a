"""Every interleaving of two handoffs over one link, as deep as a minute allows."""

from __future__ import annotations

import pytest

from tests.support.sim_explore import WORLDS, Explorer


@pytest.mark.parametrize("small", WORLDS, ids=lambda small: small.name)
def test_every_interleaving_holds_every_property(small):
    explorer = Explorer(small, depth=3)
    assert explorer.run() == "", explorer.summary()
    assert explorer.paths > 150


def test_a_world_goes_its_normal_course_and_every_path_counts_its_faults():
    explorer = Explorer(WORLDS[0], depth=1)
    assert explorer.run() == ""
    assert "depth 1" in explorer.summary()
    assert explorer.paths == len(explorer._seen)
