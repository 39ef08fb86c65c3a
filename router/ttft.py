"""When a request will have its first token: the prediction, and what it learns. Pure.

wait      until it gets a place: the longer of two queues. Prompts: all tokens before it by the
          rate at which the workers compute them. Places: the sequences before it, each of which
          holds a place for as long as sequences did lately.
service   from there to its first token: what the least busy worker has to compute before it,
          and its own prompt, by one worker's rate; and by how much such predictions were
          short lately, their mean and twice their mean deviation, as for retransmission
          timers: that is about the 95th percentile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.fair_queue import Ahead
    from router.fleet_capacity import FleetCapacity

_MEMORY = 0.9
"""Share of the old mean that is kept at a new value: it is of about the last ten."""
_DEVIATIONS = 2.0
_WAIT_LEARNED_S = 0.05
"""Of shorter waits the factor says nothing."""
_STRETCH_MAX = 3.0


class TtftModel:
    """Learns from every request, and predicts for the next one."""

    def __init__(self) -> None:
        self.hold_s: float | None = None
        """How long a sequence holds its place; None before the first has ended."""
        self._short_s: float | None = None
        self._deviation_s = 0.0
        self._stretch: float | None = None
        self._stretch_deviation = 0.0

    def waited(self, predicted_s: float, actual_s: float) -> None:
        """A request got its places, or was given up, after so long a wait."""
        if predicted_s < _WAIT_LEARNED_S:
            return
        stretch = min(actual_s / predicted_s, _STRETCH_MAX)
        old = 1.0 if self._stretch is None else self._stretch
        self._stretch_deviation = _mean(self._stretch_deviation, abs(stretch - old))
        self._stretch = _mean(old, stretch)

    def held(self, seconds: float) -> None:
        """A request gave its places back after so long."""
        self.hold_s = _mean(self.hold_s, seconds)

    def served(self, predicted_s: float, actual_s: float) -> None:
        """The first token came, after `actual_s` from when the request got its place."""
        short_s = actual_s - predicted_s
        if self._short_s is None:
            self._deviation_s = abs(short_s) / 2
        else:
            self._deviation_s = _mean(self._deviation_s, abs(short_s - self._short_s))
        self._short_s = _mean(self._short_s, short_s)

    def service_s(self, prompt_tokens: int, capacity: FleetCapacity) -> float:
        """From a place to the first token: mostly no longer than this."""
        margin_s = (self._short_s or 0.0) + _DEVIATIONS * self._deviation_s
        return max(0.0, self.plain_service_s(prompt_tokens, capacity) + margin_s)

    def plain_service_s(self, prompt_tokens: int, capacity: FleetCapacity) -> float:
        """The same by rates alone: what `served` compares with."""
        rate = capacity.lane_tokens_per_s
        if rate is None:
            return 0.0
        return (capacity.least_backlog_tokens + prompt_tokens) / rate

    def wait_s(self, ahead: Ahead, undispatched: int, free: int, capacity: FleetCapacity) -> float:
        """Until the one behind `ahead` gets a place, mostly no longer. `free` places are left now,
        `undispatched` prompt tokens are on their way to a worker."""
        usual = 1.0 if self._stretch is None else self._stretch
        stretch = min(max(usual + _DEVIATIONS * self._stretch_deviation, 1.0), _STRETCH_MAX)
        return stretch * self.plain_wait_s(ahead, undispatched, free, capacity)

    def plain_wait_s(
        self, ahead: Ahead, undispatched: int, free: int, capacity: FleetCapacity
    ) -> float:
        """The same by rates alone: what `waited` compares with."""
        prompts_s = 0.0
        rate = capacity.lane_tokens_per_s
        if rate is not None:
            # What the least busy worker has left is part of the service.
            lanes = len(capacity.lanes)
            others = capacity.backlog_tokens - lanes * capacity.least_backlog_tokens
            prompts_s = (others + undispatched + ahead.prompt_tokens) / (lanes * rate)
        return max(prompts_s, self._places_s(ahead, free, capacity.places))

    def _places_s(self, ahead: Ahead, free: int, places: int) -> float:
        if self.hold_s is None or not places:
            return 0.0
        return max(0.0, ahead.sequences + 1 - free) * self.hold_s / places


def _mean(old: float | None, new: float) -> float:
    return new if old is None else _MEMORY * old + (1 - _MEMORY) * new
