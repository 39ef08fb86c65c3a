"""When a request will have its first token: the prediction, and what it learns. Pure.

wait      until it gets a place: the longer of two queues. Prompts: all tokens before it by the
          rate at which the workers compute them. Places: the sequences before it, each of which
          holds a place for as long as sequences did lately. And the time of one prompt, because
          workers become free a prompt at a time. Stretched by a factor that such
          waits exceed in one case of fifty: it rises by a tenth whenever one does, and falls a
          little whenever one does not. Most of what makes a wait longer comes after the
          prediction, from tenants that are served before: no mean of past waits tells of that.
service   from there to its first token: what the least busy worker has to compute before it,
          and its own prompt, by one worker's rate; and by how much such predictions were
          short lately, their mean and twice their mean deviation, as for retransmission
          timers: that is about the 95th percentile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from router.fair_queue import Ahead
    from router.fleet_capacity import FleetCapacity
    from router.work import Work

_MEMORY = 0.9
"""Share of the old mean that is kept at a new value: it is of about the last ten."""
_DEVIATIONS = 2.0
_WAIT_LEARNED_S = 0.05
"""Of shorter waits the factor says nothing."""
_UNKNOWN_HOLD_S = 1.0
"""Until the first request has ended."""
_STRETCH_MIN, _STRETCH_MAX = 0.5, 4.0
_STRETCH_STEP = 0.1
_SHORT_SHARE = 0.02
"""Of waits may be longer than was predicted."""


class Before(NamedTuple):
    """What a request finds that comes now."""

    ahead: Ahead
    """Requests that are served before it."""
    undispatched: int
    """Prompt tokens on their way to a worker."""
    free: int
    """Places for it; below 0 where places have gone."""


class _Shortfall:
    """By how much predictions of the service were short lately. By nothing to begin with: the first
    request of a process is slow, and if that refused the next ones nobody would learn better."""

    def __init__(self) -> None:
        self._mean_s = 0.0
        self._deviation_s = 0.0

    def learn(self, seconds: float) -> None:
        self._deviation_s = _mean(self._deviation_s, abs(seconds - self._mean_s))
        self._mean_s = _mean(self._mean_s, seconds)

    @property
    def usual_most_s(self) -> float:
        return self._mean_s + _DEVIATIONS * self._deviation_s


class TtftModel:
    """Learns from every request, and predicts for the next one.

    Of prompts that go first it learns apart: the others are interrupted for them.
    """

    def __init__(self) -> None:
        self.hold_s: float | None = None
        """How long a sequence holds its place; None before the first has ended."""
        self._short = {goes_first: _Shortfall() for goes_first in (False, True)}
        self._stretch = dict.fromkeys((False, True), 1.0)

    def waited(self, predicted_s: float, actual_s: float, goes_first: bool = False) -> None:
        """A request got its places, or was given up, after so long a wait."""
        if predicted_s < _WAIT_LEARNED_S:
            return
        stretch = self._stretch[goes_first]
        factor = 1 + _STRETCH_STEP * ((actual_s > stretch * predicted_s) - _SHORT_SHARE)
        self._stretch[goes_first] = min(max(stretch * factor, _STRETCH_MIN), _STRETCH_MAX)

    def held(self, seconds: float) -> None:
        """A request gave its places back after so long."""
        self.hold_s = _mean(self.hold_s, seconds)

    def served(self, predicted_s: float, actual_s: float, goes_first: bool = False) -> None:
        """The first token came, after `actual_s` from when the request got its place."""
        self._short[goes_first].learn(actual_s - predicted_s)

    def service_s(
        self, prompt_tokens: int, capacity: FleetCapacity, goes_first: bool = False
    ) -> float:
        """From a place to the first token: mostly no longer than this."""
        margin_s = self._short[goes_first].usual_most_s
        return max(0.0, self.plain_service_s(prompt_tokens, capacity) + margin_s)

    def plain_service_s(self, prompt_tokens: int, capacity: FleetCapacity) -> float:
        """The same by rates alone: what `served` compares with."""
        rate = capacity.lane_tokens_per_s
        if rate is None:
            return 0.0
        return (capacity.least_backlog_tokens + prompt_tokens) / rate

    def wait_s(
        self, before: Before, capacity: FleetCapacity, prompt_tokens: int, goes_first: bool = False
    ) -> float:
        """Until a request that finds `before` gets a place, mostly no longer."""
        return self._stretch[goes_first] * self.rough_wait_s(before, capacity, prompt_tokens)

    def rough_wait_s(self, before: Before, capacity: FleetCapacity, prompt_tokens: int) -> float:
        """The same by rates alone: what `waited` compares with. Workers become free a prompt at a
        time, so a wait is known to about the time of one."""
        plain_s = self.plain_wait_s(before, capacity)
        rate = capacity.lane_tokens_per_s
        if rate is None or plain_s == 0.0:
            return plain_s
        return plain_s + prompt_tokens / rate

    def plain_wait_s(self, before: Before, capacity: FleetCapacity) -> float:
        """As if all computed evenly."""
        prompts_s = 0.0
        rate = capacity.lane_tokens_per_s
        if rate is not None:
            # What the least busy worker has left is part of the service.
            lanes = capacity.lanes_count
            others = capacity.backlog_tokens - lanes * capacity.least_backlog_tokens
            prompts_tokens = others + before.undispatched + before.ahead.prompt_tokens
            prompts_s = prompts_tokens / (lanes * rate)
        return max(prompts_s, self._places_s(before, capacity.places))

    def turn_s(self, work: Work, places: int, capacity: FleetCapacity) -> float:
        """For how long a request takes all that the workers can do."""
        rate, lanes = capacity.lane_tokens_per_s, capacity.lanes_count
        prompt_s = work.prompt_tokens / (lanes * rate) if rate is not None else 0.0
        hold_s = _UNKNOWN_HOLD_S if self.hold_s is None else self.hold_s
        return max(prompt_s, work.sequences * hold_s / places)

    def _places_s(self, before: Before, places: int) -> float:
        if self.hold_s is None or not places:
            return 0.0
        return max(0.0, before.ahead.sequences + 1 - before.free) * self.hold_s / places


def _mean(old: float | None, new: float) -> float:
    return new if old is None else _MEMORY * old + (1 - _MEMORY) * new
