"""Finds stop strings in a stream of text, wherever its pieces are cut.

One matcher per stop string keeps how many of its characters the text ends with (Knuth, Morris
and Pratt's automaton), so a character costs one step per stop string however long these are,
and the result does not depend on how the text is cut into pieces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class StopScan(NamedTuple):
    """Text that may be shown now, and the stop string that ended it, if one did."""

    text: str
    stop: str | None = None


class StopStringScanner:
    """Shows text that cannot be part of a stop string and holds the rest back."""

    def __init__(self, stops: Sequence[str]) -> None:
        # Longest first: of two that end at the same character the longer one began earlier.
        ordered = sorted(stops, key=len, reverse=True)
        self._matchers = [_Matcher(stop) for stop in ordered]
        self._held = ""

    def push(self, text: str) -> StopScan:
        """Take new text. After a stop string was found nothing may be pushed."""
        if not self._matchers:
            return StopScan(text)
        for position, character in enumerate(text):
            for matcher in self._matchers:
                if matcher.advance(character):
                    seen = self._held + text[: position + 1]
                    self._held = ""
                    return StopScan(seen[: len(seen) - len(matcher.stop)], matcher.stop)
        seen = self._held + text
        held = max(matcher.matched for matcher in self._matchers)
        self._held = seen[len(seen) - held :]
        return StopScan(seen[: len(seen) - held])

    def flush(self) -> str:
        """The text still held back: the stream ends here, so no stop string can follow."""
        held, self._held = self._held, ""
        for matcher in self._matchers:
            matcher.matched = 0
        return held


class _Matcher:
    """How much of one stop string the text ends with."""

    __slots__ = ("_fallback", "matched", "stop")

    def __init__(self, stop: str) -> None:
        assert stop, "an empty stop string matches everywhere"
        self.stop = stop
        self.matched = 0
        self._fallback = _fallback_lengths(stop)

    def advance(self, character: str) -> bool:
        """Take one character; whether the whole stop string has now been read."""
        matched = self.matched
        while matched and self.stop[matched] != character:
            matched = self._fallback[matched - 1]
        if self.stop[matched] == character:
            matched += 1
        self.matched = matched
        return matched == len(self.stop)


def _fallback_lengths(stop: str) -> list[int]:
    """Per prefix of `stop`: the length of its longest proper suffix that begins `stop`."""
    lengths = [0] * len(stop)
    matched = 0
    for position in range(1, len(stop)):
        while matched and stop[matched] != stop[position]:
            matched = lengths[matched - 1]
        if stop[matched] == stop[position]:
            matched += 1
        lengths[position] = matched
    return lengths
