"""Workers that share a machine, and slow one another down."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from simulator.step_times import StepTimes


class Hosted(Protocol):
    """What a host asks of its workers."""

    def neighbours_changed(self) -> None:
        """More or fewer of them compute now: what was planned to take long takes another time."""
        ...


class Host:
    """One machine. A step takes what it takes beside those that compute when it begins."""

    def __init__(self, times: StepTimes) -> None:
        self._by_others = [times]
        """Times of a step by the number of other workers that compute meanwhile."""
        self._is_shared = times.prompt_beside > 0.0 or times.decode_beside > 0.0
        self._busy: dict[Hosted, None] = {}

    def times(self, worker: Hosted) -> StepTimes:
        """Of a step of `worker` that begins now."""
        others = len(self._busy) - (worker in self._busy)
        while len(self._by_others) <= others:
            self._by_others.append(self._by_others[0].beside(len(self._by_others)))
        return self._by_others[others]

    def note(self, worker: Hosted, *, is_busy: bool) -> None:
        """`worker` computes, or does not."""
        if not self._is_shared or is_busy == (worker in self._busy):
            return
        if is_busy:
            self._busy[worker] = None
        else:
            del self._busy[worker]
        for other in tuple(self._busy):
            if other is not worker:
                other.neighbours_changed()
