"""A cluster in simulated time, for `benchmarks.planner`: workers that take time, and the product's
own load book, route choice and planner around them.

A worker computes steps. A step takes `chunk_tokens` of the prompts it has, first come, first
served, and one token of every answer it decodes, both if it has both: that is the interference of a
worker whose role has changed, which ends what it has. A prompt's first token comes at its end; then
its KV moves, and the answer goes on in its decode worker. As in the product a request has a place
there from before its prompt is computed, and waits at the router where there is none.

Not simulated are caches: every prompt is computed in full.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from cluster.planner import SwitchRole
from cluster.planner_input import DecodeSteps, Latency, Observation, Traffic, WorkerSeen
from engine.itl_limit import PROMPT_TOKENS_MIN
from kvferry.accounts import KvAccounts, WorkerLoad
from kvferry.clock import ManualClock
from kvferry.errors import Overloaded
from kvferry.ids import Incarnation, WorkerId
from kvferry.membership import Role, WorkerInfo
from kvferry.router_config import (
    PolicyName,
    ServiceClassConfig,
    ServiceClassesConfig,
    TenantConfig,
)
from router.admission import Admission
from router.admission_settings import AdmissionSettings
from router.fleet_capacity import FleetCapacity, fleet_capacity
from router.load import LoadBook
from router.policy import ClusterView, CostModel, Demand, Roster, WorkersView
from router.request import ServiceClass
from router.route_chooser import RouteChooser
from router.work import Work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.planner_load import Asked
    from cluster.planner import Plan, Planner
    from cluster.planner_capacity import Targets
    from router.load import DispatchTicket
    from router.ticket import Ticket

_LOOK_S = 0.05
"""As of `router.waiting_room`."""
_REQUESTS_MAX = 4096
_STATUS_S = 0.5
"""As `router.status_interval_s`."""
_MEMBERSHIP_S = 0.05
"""From an order until routers act on it."""
_SLOTS = 2**20
_NO_BLOCKS = np.empty(0, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class Timing:
    """What a worker's steps take, in seconds."""

    prompt_token_s: float = 1.0 / 8000.0
    prompt_step_s: float = 0.002
    step_s: float = 0.008
    sequence_s: float = 0.0003
    context_token_s: float = 5e-8
    """Of each token that an answer reads: what the planner's straight line knows nothing of."""
    move_token_s: float = 1e-5
    """KV of one prompt token on its way to another worker."""
    chunk_tokens: int = 2048
    running_max: int = 64
    itl_limit_s: float = 0.0
    """As `scheduler.itl_limit_ms`: beside answers a step takes as much of prompts as keeps to it.
    0: a whole chunk."""

    def chunk_beside(self, decode_s: float) -> int:
        """Prompt tokens that a step may compute, if its answers take `decode_s`; 0 s: none are
        there. As of `engine.itl_limit`."""
        if not decode_s or not self.itl_limit_s:
            return self.chunk_tokens
        left_s = self.itl_limit_s - decode_s - self.prompt_step_s
        tokens = int(left_s / self.prompt_token_s)
        return min(self.chunk_tokens, max(PROMPT_TOKENS_MIN, tokens))


@dataclass(slots=True, eq=False)
class _Request:
    asked: Asked
    ticket: DispatchTicket
    place: Ticket
    decode: _Worker
    is_moved: bool
    left: int
    """Prompt tokens to compute."""
    uncached: int = field(init=False)

    def __post_init__(self) -> None:
        self.uncached = self.left


@dataclass(slots=True, eq=False)
class _Worker:
    info: WorkerInfo
    prompts: deque[_Request] = field(default_factory=deque)
    ends: list[tuple[int, int, _Request]] = field(default_factory=list)
    """Answers being decoded, by the step after which they end."""
    context: int = 0
    """Tokens that they read."""
    to_come: int = 0
    """Sequences that have a place here and are not decoded yet."""
    is_busy: bool = False
    steps: int = 0
    rate: float = 0.0
    decode_steps: int = 0
    decode_tokens: int = 0
    decode_s: float = 0.0
    told: tuple[int, int, float] = (0, 0, 0.0)
    """The last three when the planner last looked."""

    @property
    def prompt_tokens(self) -> int:
        return sum(request.left for request in self.prompts)

    def load(self) -> WorkerLoad:
        return WorkerLoad(
            running=len(self.ends),
            waiting=self.to_come,
            waiting_tokens=self.prompt_tokens,
            prefill_tokens_per_s=self.rate,
        )

    def seen(self) -> WorkerSeen:
        counted = self.decode_steps, self.decode_tokens, self.decode_s
        steps, tokens, seconds = (now - then for now, then in zip(counted, self.told, strict=True))
        self.told = counted
        return WorkerSeen(
            self.info.worker_id,
            self.info.role,
            prompt_tokens=self.prompt_tokens,
            decoding=len(self.ends),
            prefill_tokens_per_s=self.rate,
            decode=DecodeSteps(int(steps), int(tokens), seconds),
        )


class _Counts:
    """What a router counts in one interval."""

    def __init__(self) -> None:
        self.requests = self.prompts = self.prompt_tokens = 0
        self.answers = self.answer_tokens = 0
        self.prompt_squares = 0.0
        self.ttfts: list[float] = []
        self.itls: list[float] = []


class PlannerSim:
    """One cluster under one load, with a planner or without."""

    def __init__(
        self,
        timing: Timing,
        split: tuple[int, int],
        targets: Targets,
        planner: Planner | None = None,
        interval_s: float = 2.0,
    ) -> None:
        """`split`: workers that compute prompts and workers that decode, at first. Who would not
        have its first token in time is refused."""
        self._timing = timing
        self._clock = ManualClock()
        self._planner = planner
        self._interval_s = interval_s
        self._targets = targets
        self._rng = random.Random(0)
        roles = [Role.PREFILL] * split[0] + [Role.DECODE] * split[1]
        self._workers = {
            WorkerId(f"worker-{number}"): _Worker(
                WorkerInfo(WorkerId(f"worker-{number}"), role, Incarnation(number), "")
            )
            for number, role in enumerate(roles)
        }
        self._loads = LoadBook()
        for name in self._workers:
            self._loads.add(name)
        model = CostModel(kv_bytes_per_token=1, running_max=timing.running_max)
        self._chooser = RouteChooser(PolicyName.PRICED_TIME, model, 16, self._clock)
        standard = ServiceClassConfig(ttft_limit_s=targets.ttft_s, weight=2.0)
        classes = ServiceClassesConfig(standard=standard)
        self._admission = Admission(
            AdmissionSettings(classes, TenantConfig(), _REQUESTS_MAX, timing.chunk_tokens)
        )
        self._waiting: dict[Ticket, Asked] = {}
        self._is_looking = False
        self._known: tuple[int, FleetCapacity] | None = None
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._counts = _Counts()
        self._roster: tuple[Roster, int] | None = None
        self._live = 0
        self.plans: list[Plan] = []

    def run(self, load: Sequence[Asked], give_up_s: float = 60.0) -> None:
        """Play the load; what has not ended `give_up_s` after the last arrival never does."""
        for asked in load:
            self._at(asked.at, lambda asked=asked: self._arrive(asked))
        self._live = len(load)
        self._at(_STATUS_S, self._report)
        if self._planner is not None:
            self._at(self._interval_s, self._plan)
        last = load[-1].at + give_up_s if load else 0.0
        while self._events and self._live:
            at, _, happen = heapq.heappop(self._events)
            if at > last:
                return
            self._clock.advance(at - self._clock.now())
            happen()

    def _at(self, at: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._order), happen))

    def _after(self, seconds: float, happen: Callable[[], None]) -> None:
        self._at(self._clock.now() + seconds, happen)

    # --- the router -----------------------------------------------------------------------------

    def _arrive(self, asked: Asked) -> None:
        self._counts.requests += 1
        now, capacity, ticket = self._clock.now(), self._capacity(), None
        try:
            ticket = self._admission.arrive(ServiceClass.STANDARD, "", now, capacity)
            self._admission.submit(ticket, _work_of(asked), now, capacity)
        except Overloaded:
            if ticket is not None:
                self._admission.end(ticket, now)
            self._live -= 1
            return
        self._waiting[ticket] = asked
        self._look()

    def _look(self) -> None:
        """As `router.waiting_room` does."""
        if not self._waiting:
            return
        decisions = self._admission.decide(self._clock.now(), self._capacity())
        for ticket, _ in decisions.refused:
            del self._waiting[ticket]
            self._live -= 1
        for ticket in decisions.granted:
            self._place(self._waiting.pop(ticket), ticket)
        if self._waiting and not self._is_looking:
            self._is_looking = True
            self._after(_LOOK_S, self._look_again)

    def _look_again(self) -> None:
        self._is_looking = False
        self._look()

    def _capacity(self) -> FleetCapacity:
        if self._known is None or self._known[0] != self._loads.changes:
            view = self._view()
            capacity = fleet_capacity(
                (view.prefill if view.prefillers else view.decode).loads,
                len(view.decode.roster),
                self._timing.running_max,
                _SLOTS,
            )
            self._known = self._loads.changes, capacity
        return self._known[1]

    def _view(self) -> ClusterView:
        if self._roster is None:
            infos = [worker.info for worker in self._workers.values()]
            infos.sort(key=lambda info: info.role is not Role.PREFILL)
            prefillers = sum(info.role is Role.PREFILL for info in infos)
            self._roster = Roster.of(infos), prefillers
        roster, prefillers = self._roster
        rows = self._loads.rows_of([info.worker_id for info in roster.infos])
        hits = np.zeros(len(roster), dtype=np.int64)
        return ClusterView(WorkersView(roster, hits, self._loads.loads(rows)), prefillers)

    def _place(self, asked: Asked, place: Ticket) -> None:
        demand, nobody = Demand(asked.prompt, asked.answer), frozenset[WorkerId]()
        route = self._chooser.choose(self._view(), demand, _NO_BLOCKS, nobody, self._rng)
        ticket = self._loads.dispatch(
            self._clock.now(),
            prefill=route.computing.worker_id,
            decode=route.decode.worker_id,
            prefill_tokens=route.prefill_tokens,
            kv_tokens=asked.prompt + asked.answer,
        )
        self._admission.dispatched(place)
        self._counts.prompts += 1
        self._counts.prompt_tokens += route.prefill_tokens
        self._counts.prompt_squares += float(route.prefill_tokens) ** 2
        computing = self._workers[route.computing.worker_id]
        decode = self._workers[route.decode.worker_id]
        decode.to_come += 1
        is_moved = computing is not decode
        request = _Request(asked, ticket, place, decode, is_moved, route.prefill_tokens)
        computing.prompts.append(request)
        self._wake(computing)

    def _report(self) -> None:
        now = self._clock.now()
        accounts = KvAccounts(_SLOTS, 0, 0, 0, 0, _SLOTS, 0, 0, _SLOTS)
        for name, worker in self._workers.items():
            self._loads.report(name, now, worker.load(), accounts)
        self._after(_STATUS_S, self._report)

    # --- workers --------------------------------------------------------------------------------

    def _wake(self, worker: _Worker) -> None:
        if worker.is_busy or not (worker.prompts or worker.ends):
            return
        worker.is_busy = True
        decode_s = self._decode_s(worker)
        most = self._timing.chunk_beside(decode_s)
        budget, computed = most, []
        for request in worker.prompts:
            tokens = min(budget, request.left)
            computed.append((request, tokens))
            budget -= tokens
            if not budget:
                break
        tokens = most - budget
        seconds = decode_s + self._prompt_s(tokens)
        self._after(seconds, lambda: self._stepped(worker, computed, tokens, seconds))

    def _decode_s(self, worker: _Worker) -> float:
        if not worker.ends:
            return 0.0
        timing = self._timing
        seconds = timing.step_s + timing.sequence_s * len(worker.ends)
        return seconds + timing.context_token_s * worker.context

    def _prompt_s(self, tokens: int) -> float:
        timing = self._timing
        return timing.prompt_step_s + timing.prompt_token_s * tokens if tokens else 0.0

    def _stepped(
        self,
        worker: _Worker,
        computed: list[tuple[_Request, int]],
        tokens: int,
        seconds: float,
    ) -> None:
        self._decoded(worker, seconds, with_prompts=tokens > 0)
        if tokens:
            rate = tokens / seconds
            worker.rate = rate if not worker.rate else 0.9 * worker.rate + 0.1 * rate
        for request, done in computed:
            request.left -= done
            if not request.left:
                worker.prompts.popleft()
                self._first_token(request)
        worker.is_busy = False
        self._wake(worker)

    def _decoded(self, worker: _Worker, seconds: float, *, with_prompts: bool) -> None:
        sequences = len(worker.ends)
        if not sequences:
            return
        worker.steps += 1
        worker.context += sequences
        self._counts.answer_tokens += sequences
        if not with_prompts:
            worker.decode_steps += 1
            worker.decode_tokens += sequences
            worker.decode_s += seconds
        while worker.ends and worker.ends[0][0] <= worker.steps:
            request = heapq.heappop(worker.ends)[2]
            worker.context -= request.asked.prompt + request.asked.answer
            self._end(request)

    def _first_token(self, request: _Request) -> None:
        asked, now = request.asked, self._clock.now()
        asked.first_at = now
        self._loads.prefilled(request.ticket)
        self._admission.answered(request.place, request.uncached, 1, now)
        self._look()
        self._counts.ttfts.append(asked.ttft_s)
        self._counts.answer_tokens += 1
        move_s = self._timing.move_token_s * asked.prompt if request.is_moved else 0.0
        self._after(move_s, lambda: self._join(request))

    def _join(self, request: _Request) -> None:
        worker, asked = request.decode, request.asked
        worker.to_come -= 1
        # It takes part in the steps that begin from now on, of which one may be under way.
        last = worker.steps + asked.answer - 1 + worker.is_busy
        heapq.heappush(worker.ends, (last, next(self._order), request))
        worker.context += asked.prompt + 1 - worker.is_busy
        self._wake(worker)

    def _end(self, request: _Request) -> None:
        asked = request.asked
        asked.ended_at = self._clock.now()
        self._loads.end(request.ticket)
        self._admission.answered(request.place, 0, asked.answer - 1, asked.ended_at)
        self._admission.end(request.place, asked.ended_at)
        self._live -= 1
        self._counts.answers += 1
        self._counts.itls.append(asked.itl_s)
        self._look()

    # --- the planner ----------------------------------------------------------------------------

    def _plan(self) -> None:
        assert self._planner is not None
        workers = tuple(worker.seen() for worker in self._workers.values())
        seen = Observation(self._clock.now(), workers, self._traffic(), self._timing.running_max)
        plan = self._planner.plan(seen)
        self.plans.append(plan)
        for decision in plan.decisions:
            assert isinstance(decision, SwitchRole), decision
            self._after(_MEMBERSHIP_S, lambda order=decision: self._switch(order))
        self._after(self._interval_s, self._plan)

    def _switch(self, order: SwitchRole) -> None:
        worker = self._workers[order.worker_id]
        info = worker.info
        worker.info = WorkerInfo(info.worker_id, order.role, info.incarnation, info.address)
        self._roster = self._known = None
        self._look()

    def _traffic(self) -> Traffic:
        counts, self._counts = self._counts, _Counts()
        return Traffic(
            self._interval_s,
            requests=counts.requests,
            prompts=counts.prompts,
            prompt_tokens=counts.prompt_tokens,
            prompt_tokens_squared=counts.prompt_squares,
            answers=counts.answers,
            answer_tokens=counts.answer_tokens,
            waiting=len(self._waiting),
            ttft=_latency(counts.ttfts, self._targets.ttft_s),
            itl=_latency(counts.itls, self._targets.itl_s),
        )


def _work_of(asked: Asked) -> Work:
    """Of a client that names the longest answer it takes, and is not told how long it will be."""
    return Work(
        prompt_tokens=asked.prompt,
        answer_tokens=128,
        kv_tokens=asked.prompt,
        prompt_len=asked.prompt,
        longest=asked.prompt,
    )


def _latency(values: list[float], target: float) -> Latency:
    if not values:
        return Latency()
    ordered = sorted(values)
    kept = sum(value <= target for value in ordered)
    return Latency(
        len(ordered),
        kept,
        ordered[(len(ordered) - 1) // 2],
        ordered[math.ceil(0.9 * len(ordered)) - 1],
    )
