"""Workers that take time, simulated, in front of the real admission. No clock but the simulated.

Each lane computes prompts at its rate, step by step, in the order of `engine.prompt_order`; then
the answer holds its places for its length. What admission sees of the lanes is as coarse as in the
router: a prompt counts in full until its first token.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from engine.prompt_order import count_passed_over, turn
from kvferry.errors import Overloaded
from router.admission import Admission
from router.fleet_capacity import FleetCapacity, PrefillLane
from router.request import ServiceClass
from router.work import Work

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable

    from router.admission_settings import AdmissionSettings
    from router.ticket import Ticket

_CHECKED_EVERY = 200
"""Events; a check looks at every request."""


@dataclass(eq=False)
class Asked:
    """One request of the load, and what became of it."""

    at: float
    tenant: str
    prompt_tokens: int
    answer_s: float
    service_class: ServiceClass = ServiceClass.STANDARD
    sequences: int = 1
    ttft_s: float | None = None
    refused_after_s: float | None = None
    retry_after_s: float | None = None
    ended_at: float | None = None
    ticket: Ticket | None = None
    tries_left: int = 0
    """A client that is refused asks again when it was told to."""
    again: Asked | None = None


@dataclass(eq=False)
class _Prompt:
    """What `engine.prompt_order` looks at of an `engine.request.Request`."""

    asked: Asked
    goes_first: bool
    arrival: int
    uncomputed: int
    passed_over: int = 0


@dataclass(eq=False)
class _Lane:
    prompts: list[_Prompt] = field(default_factory=list)
    is_busy: bool = False

    def backlog_tokens(self, *, first_only: bool = False) -> int:
        counted = (each for each in self.prompts if each.goes_first or not first_only)
        return sum(each.asked.prompt_tokens for each in counted)


class OverloadSim:
    """A fleet of `lanes` that compute `tokens_per_s` each, with `places` altogether."""

    def __init__(
        self, settings: AdmissionSettings, *, lanes: int, tokens_per_s: float, places: int
    ) -> None:
        self.admission = Admission(settings)
        self.now = 0.0
        self.places = places
        self.busy_s = 0.0
        """Of all lanes together."""
        self._lanes = [_Lane() for _ in range(lanes)]
        self._tokens_per_s = tokens_per_s
        self._step_tokens = settings.step_tokens
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._asked: dict[Ticket, Asked] = {}
        self._limit: float | None = None

    def run(self, load: Iterable[Asked]) -> list[Asked]:
        """Play the load to its end."""
        every = list(load)
        for asked in every:
            self._at(asked.at, functools.partial(self._arrive, asked))
        while self._events:
            self.now, number, happen = heapq.heappop(self._events)
            happen()
            self._decide()
            if number % _CHECKED_EVERY == 0:
                self.admission.check_invariants(list(self._asked))
        assert not self._asked, "somebody has no end"
        return every

    def capacity(self) -> FleetCapacity:
        rate = self._tokens_per_s
        lanes = (
            PrefillLane(lane.backlog_tokens(), rate, lane.backlog_tokens(first_only=True))
            for lane in self._lanes
        )
        return FleetCapacity(self.places, None, tuple(lanes))

    def _at(self, time: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), happen))

    def _arrive(self, asked: Asked) -> None:
        work = Work(asked.prompt_tokens, 0, asked.sequences, longest=asked.prompt_tokens)
        ticket = None
        try:
            ticket = self.admission.arrive(
                asked.service_class, asked.tenant, self.now, self.capacity()
            )
            self.admission.submit(ticket, work, self.now, self.capacity())
        except Overloaded as error:
            if ticket is not None:
                self.admission.end(ticket, self.now)
            self._refused(asked, error)
        else:
            asked.ticket = ticket
            self._asked[ticket] = asked

    def _decide(self) -> None:
        decisions = self.admission.decide(self.now, self.capacity())
        for ticket, error in decisions.refused:
            self._refused(self._asked.pop(ticket), error)
        for ticket in decisions.granted:
            self._dispatch(self._asked[ticket])
        limit = self.admission.next_limit()
        if limit is not None and limit != self._limit:
            self._limit = limit
            self._at(max(self.now, math.nextafter(limit, math.inf)), lambda: None)
        if decisions.granted:
            self._decide()

    def _refused(self, asked: Asked, error: Overloaded) -> None:
        asked.refused_after_s = self.now - asked.at
        asked.retry_after_s = error.retry_after_s
        if asked.tries_left:
            asked.again = replace(
                asked,
                at=self.now + error.retry_after_s,
                tries_left=asked.tries_left - 1,
                refused_after_s=None,
                retry_after_s=None,
                ticket=None,
            )
            self._at(asked.again.at, functools.partial(self._arrive, asked.again))

    def _dispatch(self, asked: Asked) -> None:
        ticket = asked.ticket
        assert ticket is not None
        first = ticket.goes_first
        lane = min(self._lanes, key=lambda lane: lane.backlog_tokens(first_only=first))
        lane.prompts.append(_Prompt(asked, first, next(self._order), asked.prompt_tokens))
        self.admission.dispatched(ticket)
        if not lane.is_busy:
            self._step(lane)

    def _step(self, lane: _Lane) -> None:
        left, computed = self._step_tokens, []
        for prompt in sorted(lane.prompts, key=turn):
            if left:
                tokens = min(left, prompt.uncomputed)
                computed.append((prompt, tokens))
                left -= tokens
        count_passed_over(lane.prompts, [prompt for prompt, _ in computed])
        seconds = (self._step_tokens - left) / self._tokens_per_s
        self.busy_s += seconds
        lane.is_busy = bool(computed)
        if computed:
            self._at(self.now + seconds, functools.partial(self._stepped, lane, computed))

    def _stepped(self, lane: _Lane, computed: list[tuple[_Prompt, int]]) -> None:
        for prompt, tokens in computed:
            prompt.uncomputed -= tokens
        done = [prompt for prompt, _ in computed if not prompt.uncomputed]
        lane.prompts = [prompt for prompt in lane.prompts if prompt.uncomputed]
        # The next step begins before the router has heard of what this one has finished.
        self._step(lane)
        for prompt in done:
            self._answered(prompt.asked)

    def _answered(self, asked: Asked) -> None:
        asked.ttft_s = self.now - asked.at
        assert asked.ticket is not None
        self.admission.answered(asked.ticket, asked.prompt_tokens, 1, self.now)
        self._at(self.now + asked.answer_s, functools.partial(self._end, asked))

    def _end(self, asked: Asked) -> None:
        asked.ended_at = self.now
        assert asked.ticket is not None
        del self._asked[asked.ticket]
        self.admission.end(asked.ticket, self.now)


def poisson(
    rng: random.Random, tenant: str, per_s: float, until_s: float, **fields: float
) -> list[Asked]:
    """Requests at random moments; `prompt` tokens, answers of `answer_s`, both varied by half."""
    load, now = [], 0.0
    while (now := now + rng.expovariate(per_s)) < until_s:
        prompt = fields["prompt"] * rng.uniform(0.5, 1.5)
        answer_s = fields["answer_s"] * rng.uniform(0.5, 1.5)
        load.append(Asked(now, tenant, round(prompt), answer_s))
    return load


def percentile(values: Iterable[float], share: float) -> float:
    """The value that `share` of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]
