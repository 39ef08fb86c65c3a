"""Simulated time: what happens next, in order."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class EventQueue:
    """Calls to be made at their times; of those at one time, the one asked for first. A `Clock`."""

    def __init__(self) -> None:
        self.time = 0.0
        """Seconds since the run began."""
        self.calls = 0
        """Made so far."""
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._asked = 0

    def now(self) -> float:
        """Simulated seconds."""
        return self.time

    def at(self, when: float, call: Callable[..., None], *arguments: object) -> None:
        """Call it then; what is past is now."""
        self._asked += 1
        heapq.heappush(self._heap, (max(when, self.time), self._asked, call, arguments))

    def after(self, seconds: float, call: Callable[..., None], *arguments: object) -> None:
        """Call it so much later."""
        self.at(self.time + seconds, call, *arguments)

    def step(self) -> bool:
        """Make the next call. False: there is none."""
        if not self._heap:
            return False
        self.time, _, call, arguments = heapq.heappop(self._heap)
        self.calls += 1
        call(*arguments)
        return True
