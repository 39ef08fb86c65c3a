"""When an attempt passed its marks, for the router's timeline of the request."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from kvferry.attempt_marks import AttemptMarks

if TYPE_CHECKING:
    from kvferry.attempt_marks import PromptMarks
    from kvferry.clock import Clock


class Mark(Enum):
    """A mark, by the name of its field."""

    FETCHED = "fetched_s"
    READY = "ready_s"
    GRANTED = "granted_s"
    ADMITTED = "admitted_s"
    FIRST_TOKEN = "first_token_s"
    ADOPTED = "adopted_s"
    ENDED = "ended_s"

    # Each is one object. `Enum` has a function of Python for it, called once per token here.
    __hash__ = object.__hash__


class AttemptTimes:
    """The marks of one attempt: at most one reading of the clock for each."""

    __slots__ = ("_accepted_at", "_clock", "_passed_s")

    def __init__(self, clock: Clock, accepted_at: float) -> None:
        """`accepted_at`, of the same clock: when the worker heard of the attempt."""
        self._clock = clock
        self._accepted_at = accepted_at
        self._passed_s: dict[Mark, float] = {}

    def note(self, mark: Mark) -> None:
        """It is passed now; only the first time counts."""
        if mark not in self._passed_s:
            self._passed_s[mark] = self._clock.now() - self._accepted_at

    def marks(self, source: PromptMarks | None) -> AttemptMarks:
        """As they are now."""
        return AttemptMarks(
            **{mark.value: passed_s for mark, passed_s in self._passed_s.items()}, source=source
        )
