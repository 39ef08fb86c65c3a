"""What a reader of streams waits for: the gaps between the messages that carry tokens."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True, slots=True)
class Window:
    """A span of time, in seconds of one clock."""

    start_s: float
    stop_s: float


def gaps_in(arrivals: Iterable[Sequence[float]], window: Window) -> list[float]:
    """Seconds between neighbouring arrivals of each stream, for gaps that begin in `window`.

    A gap belongs to the window in which it begins, however late it ends, so a stall counts in full.
    """
    return [
        later - earlier
        for times in arrivals
        for earlier, later in itertools.pairwise(times)
        if window.start_s <= earlier < window.stop_s
    ]


def percentile(values: Iterable[float], percent: float) -> float:
    """The smallest of `values` that at least `percent` of them do not exceed (nearest rank)."""
    ordered = sorted(values)
    assert ordered, "no values"
    assert 0.0 < percent <= 100.0, percent
    return ordered[math.ceil(percent / 100.0 * len(ordered)) - 1]
