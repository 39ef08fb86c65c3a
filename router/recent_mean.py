"""The mean of a number over the time of late. Pure."""

from __future__ import annotations

import math


class RecentMean:
    """Of a number that changes now and then; what was `seconds` ago counts 1/e of what is now.

    Exact however often it is asked, so means of several numbers add up to the mean of their sum.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._mean = 0.0
        self._number = 0
        self._as_of = 0.0

    def mean(self, now: float) -> float:
        """As of `now`, which never goes back, in seconds. 0 before the first number."""
        old = math.exp((self._as_of - now) / self._seconds)
        return old * self._mean + (1.0 - old) * self._number

    def now_is(self, number: int, now: float) -> None:
        """The number from now on."""
        self._mean = self.mean(now)
        self._number = number
        self._as_of = now
