"""Staying with a cluster until it is gone, on a clock of the test."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import pytest

from cluster.member_state import Phase
from cluster.stay import ClusterGone, stay
from kvferry.clock import ManualClock
from kvferry.errors import WorkerUnavailable
from kvferry.limits import SUPERVISOR_ABSENCE_MAX_S
from tests.support.cluster_views import view_of

if TYPE_CHECKING:
    from cluster.supervisor import ClusterView


class Script:
    """A supervisor that gives views, is silent at an error, absent at None, interrupts at last."""

    def __init__(self, clock: ManualClock, *steps: ClusterView | Exception | None) -> None:
        self._clock = clock
        self._steps = deque(steps)
        self.asked: list[int] = []
        self.said: list[str] = []

    def find(self) -> Script | None:
        if self._steps and self._steps[0] is None:
            self._steps.popleft()
            return None
        return self

    def wait_for_change(self, seen: int, timeout_s: float) -> ClusterView:
        self.asked.append(seen)
        if not self._steps:
            raise KeyboardInterrupt
        step = self._steps.popleft()
        if isinstance(step, Exception):
            raise step
        assert step is not None
        return step

    def run(self) -> None:
        stay(self.find, self._clock, self._clock.advance, self.said.append)


def test_news_are_told_until_an_interrupt() -> None:
    running, ended = view_of(7, a=Phase.RUNNING), view_of(8, a=Phase.WAITING)
    script = Script(ManualClock(), running, ended)
    with pytest.raises(KeyboardInterrupt):
        script.run()
    assert script.said == ["a: waiting (killed)"]
    # Each time for what is beyond the view before.
    assert script.asked == [0, 7, 8]


def test_a_supervisor_that_comes_back_is_waited_for() -> None:
    steps = [view_of(1, a=Phase.RUNNING), WorkerUnavailable("killed"), None, None]
    script = Script(ManualClock(), *steps, view_of(2, a=Phase.STARTING))
    with pytest.raises(KeyboardInterrupt):
        script.run()
    assert script.said == ["a: starting"]


def test_without_a_supervisor_the_cluster_is_gone() -> None:
    clock = ManualClock()
    script = Script(clock, view_of(1, a=Phase.RUNNING), *([None] * 1000))
    begun = clock.now()
    with pytest.raises(ClusterGone, match="there is no supervisor"):
        script.run()
    assert SUPERVISOR_ABSENCE_MAX_S < clock.now() - begun < SUPERVISOR_ABSENCE_MAX_S + 5.0
