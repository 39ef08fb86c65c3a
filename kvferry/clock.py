"""Time as a dependency, so that deadlines are tested without waiting for them."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic time in seconds; its origin means nothing."""

    def now(self) -> float:
        """Seconds since an arbitrary origin, never going back."""
        ...


class MonotonicClock:
    """The operating system's monotonic clock."""

    def now(self) -> float:
        """Seconds of `time.monotonic`."""
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to. For tests and simulations."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        """The time set last."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds` >= 0."""
        assert seconds >= 0, f"a monotonic clock cannot go back by {-seconds} s"
        self._now += seconds


def unix_time_s() -> float:
    """The time of day, in seconds since 1970: for telling people when, never for measuring."""
    return time.time()


def thread_cpu_s() -> float:
    """Seconds that the processor has worked for the calling thread: the cost of a piece of work,
    however busy the machine is with others."""
    return time.thread_time()
