"""What requests ask for, from what routers counted: means of late, and where they are going. Pure.

Prompts ask for tokens to be computed as they arrive. Answers ask for tokens as long as they last,
and how long that is shows only at their end; so their mean length is the tokens streamed of all
over the answers ended: the estimate of largest likelihood for lengths of which some are cut off.
It rises while answers grow longer than they were, although none of these has ended yet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.planner_input import Observation

_LEVEL_S = 4.0
"""Time constant of a level..."""
_TREND_S = 8.0
"""...and of its change."""
_AHEAD_S = 4.0
"""How far a trend is followed: what is decided now acts by then."""
_LENGTHS_S = 10.0
"""Time constant of mean lengths."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked for, now and in the next interval."""

    prompt_tokens_per_s: float
    prompt_tokens: float
    """Of one prompt that has to be computed, the mean; 0: none came yet."""
    prompt_variation: float
    """Variance over square of that mean."""
    answer_tokens_per_s: float
    answer_tokens: float
    """Of one answer, the mean; 0: none came yet."""
    backlog_tokens: float
    """Of prompts that came and are not computed."""
    sequences: float
    """Being decoded, or kept from it by too few places."""


class Forecast:
    """A level and its change per second, smoothed (Holt), followed a little into the future."""

    def __init__(self) -> None:
        self._level: float | None = None
        self._per_s = 0.0

    def learn(self, value: float, seconds: float) -> None:
        """What was seen in an interval of so long."""
        if self._level is None:
            self._level = value
            return
        before = self._level
        self._level += (1.0 - math.exp(-seconds / _LEVEL_S)) * (value - before)
        change = (self._level - before) / seconds
        self._per_s += (1.0 - math.exp(-seconds / _TREND_S)) * (change - self._per_s)

    @property
    def value(self) -> float:
        """Expected soon, at least 0."""
        return max(0.0, (self._level or 0.0) + _AHEAD_S * self._per_s)


class _Mean:
    """A mean of late, and of squares."""

    def __init__(self) -> None:
        self._count = self._sum = self._squares = 0.0

    def learn(self, count: float, total: float, squares: float, seconds: float) -> None:
        """What an interval of so long added."""
        kept = math.exp(-seconds / _LENGTHS_S)
        self._count = kept * self._count + count
        self._sum = kept * self._sum + total
        self._squares = kept * self._squares + squares

    @property
    def value(self) -> float:
        """0 before the first; of less than one, as if it were one."""
        return self._sum / max(self._count, 1.0)

    @property
    def variation(self) -> float:
        """Variance over square of the mean."""
        if self._sum <= 0.0:
            return 0.0
        return max(0.0, self._squares * self._count / self._sum**2 - 1.0)


class DemandMeter:
    """Learns from every observation."""

    def __init__(self) -> None:
        self._requests = Forecast()
        self._prompt_tokens = Forecast()
        self._sequences = Forecast()
        self._prompt = _Mean()
        self._answer = _Mean()

    def learn(self, seen: Observation) -> Demand:
        """Take one interval in; what is asked for by now."""
        traffic = seen.traffic
        seconds = traffic.seconds
        self._requests.learn(traffic.requests / seconds, seconds)
        prompts = traffic.prompts, traffic.prompt_tokens, traffic.prompt_tokens_squared
        self._prompt.learn(*prompts, seconds)
        self._answer.learn(traffic.answers, traffic.answer_tokens, 0.0, seconds)
        prompt, answer = self._prompt.value, self._answer.value
        # Those that were refused ask again, or would have: as much as the others of their time.
        asked = traffic.prompt_tokens * max(1.0, traffic.requests / max(1, traffic.prompts))
        self._prompt_tokens.learn(asked / seconds, seconds)
        decoding = float(sum(worker.decoding for worker in seen.workers))
        held_back = _held_back_by_answers(seen, decoding)
        self._sequences.learn(decoding + held_back, seconds)
        backlog = sum(worker.prompt_tokens for worker in seen.workers)
        return Demand(
            prompt_tokens_per_s=self._prompt_tokens.value,
            prompt_tokens=prompt,
            prompt_variation=self._prompt.variation,
            answer_tokens_per_s=self._requests.value * answer,
            answer_tokens=answer,
            backlog_tokens=backlog + (traffic.waiting - held_back) * prompt,
            sequences=max(decoding + held_back, self._sequences.value),
        )


def _held_back_by_answers(seen: Observation, decoding: float) -> float:
    """Of the requests without a place, those that answers keep from one.

    A request has its place from before its prompt is computed. So places may be taken by answers
    or by prompts, and who waits for one is kept waiting by either in proportion.
    """
    places = seen.running_max * sum(worker.decodes for worker in seen.workers)
    return seen.traffic.waiting * min(1.0, decoding / places) if places else 0.0
