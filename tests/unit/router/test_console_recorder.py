from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from kvferry.clock import ManualClock
from router.api.console.recorder import ClusterRecorder

if TYPE_CHECKING:
    from router.router import Router


def recorder(clock: ManualClock) -> ClusterRecorder:
    """One that is not to take any sample."""
    return ClusterRecorder(cast("Router", None), clock)


@pytest.mark.parametrize(
    ("cost_s", "pause_s"), [(0.0001, 1.0), (0.001, 1.0), (0.004, 4.0), (0.02, 10.0)]
)
def test_samples_that_nobody_sees_take_a_thousandth_of_the_time(
    cost_s: float, pause_s: float
) -> None:
    clock = ManualClock()
    unseen = recorder(clock)
    clock.advance(20.0)
    assert unseen.pause_s(cost_s) == pytest.approx(pause_s)


def test_who_looks_gets_one_each_second() -> None:
    clock = ManualClock()
    seen = recorder(clock)
    assert seen.pause_s(0.02) == 1.0
    clock.advance(20.0)
    assert seen.pause_s(0.02) == 10.0
    seen.history(-1)
    assert seen.pause_s(0.02) == 1.0
