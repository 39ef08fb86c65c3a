"""Which requests run, which wait, and which are refused. Pure: the time and the fleet are told.

A request *arrives* (limits of its tenant, room in the queue of its class), is *submitted* when its
prompt is known (the tenant's tokens, the predicted time to its first token), waits until `decide`
*grants* it places, one per sample, and gives them back at its *end*.

Places are granted in the order of `router.fair_queue`, the next one only when it fits, so nobody
starves. Queues are to be here, where there is an order, and not at workers, which serve in order
of arrival. So workers are given what keeps them busy and no more:

    places    as many sequences as they decode together, `requests_max` at most;
    KV        what their slots hold, by the same promise that workers admit by;
    prompts   the next one when some worker has less to compute before it than it does in a step.

A tenant that asks for little beside one that asks for everything (`router.demand`, `FairQueue`)
*goes first*: workers compute its prompt before those that do not, which they interrupt between two
steps, and where a place is free it does not wait until a worker is.

While several tenants are here, the last eighth of the places is kept for those that have less than
their part: long answers of one tenant do not make another one wait for an end. From a tenant that
crowds, beyond its part, as many are kept as the others mostly use. And a queue that one tenant has
filled is not full for another: the tenant that has most in it loses its newest.

A request that finds nobody running is always taken, so that a prediction learns of better times.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvferry.errors import Overloaded
from kvferry.limits import RETRY_AFTER_MAX_S, RETRY_AFTER_MIN_S
from router.admission_snapshot import AdmissionSnapshot, ClassSnapshot
from router.demand import DemandBook
from router.fair_queue import FairQueue
from router.recent_mean import RecentMean
from router.request import ServiceClass
from router.tenants import USUAL_S, Refusal, RefusalReason, TenantBook
from router.ticket import Stage, Ticket
from router.ttft import Before, TtftModel

if TYPE_CHECKING:
    from router.admission_settings import AdmissionSettings
    from router.fleet_capacity import FleetCapacity
    from router.tenants import Tenant
    from router.work import Work

_KEPT_SHARE = 8
"""One of so many places is kept for tenants that have few."""
_DEVIATIONS = 3.0
"""Of a Poisson distribution."""
_TOLD_SHARE = 0.5
"""Of what workers can do is given out in hints; the rest is for those who did not ask yet."""
_DEAD_LIMITS_MAX = 64
"""Limits of requests that no longer wait are swept when there are more than this."""


@dataclass(slots=True)
class Decisions:
    """What became of requests that waited."""

    granted: list[Ticket] = field(default_factory=list)
    refused: list[tuple[Ticket, Overloaded]] = field(default_factory=list)
    """They have ended."""


@dataclass(slots=True, eq=False)
class _ClassCounts:
    arrived: int = 0
    """Whose prompts are being tokenized."""
    running: int = 0
    granted: int = 0
    wait_s: float = 0.0
    wait_max_s: float = 0.0
    refused: Counter[RefusalReason] = field(default_factory=Counter)


class Admission:
    """All requests of one router."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self._settings = settings
        self._queue: FairQueue[Ticket] = FairQueue(settings.weights)
        self._tenants = TenantBook(settings.tenants)
        self._ttft = TtftModel()
        self._demand = DemandBook()
        self._counts = {each: _ClassCounts() for each in ServiceClass}
        self._running = 0
        self._sequences = 0
        self._kv_tokens = 0
        self._undispatched_tokens = 0
        """Of prompts that have places but that no worker's load counts yet."""
        self._undispatched_first = 0
        """Of these, the tokens of prompts that go first."""
        self._usual_sequences = RecentMean(USUAL_S)
        self._limits: list[tuple[float, int, Ticket]] = []
        """A heap of (latest grant, order, ticket). Those that no longer wait stay for a while."""
        self._order = itertools.count()
        self._displaced: list[tuple[Ticket, Overloaded]] = []
        """Ended to make room, which is told with the next decisions."""

    @property
    def waiting(self) -> int:
        """Requests that wait for places."""
        return len(self._queue)

    # --- from arrival to end ----------------------------------------------------------------

    def arrive(
        self, service_class: ServiceClass, tenant_name: str, now: float, capacity: FleetCapacity
    ) -> Ticket:
        """Count a request whose prompt is not known yet. Its ticket has to be ended.

        Raises `Overloaded`, and `InvalidInput` for a tenant whose name is too long.
        """
        for name in self._tenants.forget_idle(now):
            self._queue.forget(name)
            self._demand.forget(name)
        counts = self._counts[service_class]
        here = self._queue.count(service_class) + counts.arrived
        free = max(0, self._places(capacity) - self._sequences)
        is_full = here >= self._settings.of(service_class).queue_max + free
        ticket = Ticket(service_class, self._tenants.find(tenant_name, now), arrived_at=now)
        if is_full and self._longer_queue(service_class, tenant_name) is None:
            self._demand.asked(tenant_name, None, now)
            raise self._no_room(ticket, ticket.work, self._queue_full(service_class), now, capacity)
        refusal = self._tenants.enter(ticket.tenant, now, self._ttft.hold_s)
        if refusal is not None:
            raise self._overloaded(service_class, refusal)
        counts.arrived += 1
        return ticket

    def would_wait(self, ticket: Ticket, work: Work, now: float, capacity: FleetCapacity) -> bool:
        """Whether `work` could not begin at once."""
        if len(self._queue):
            return True
        places = self._places(capacity)
        may_take = self._may_take(ticket.tenant, places, now)
        return not (may_take and self._fits(work, places, capacity, goes_first=False))

    def submit(self, ticket: Ticket, work: Work, now: float, capacity: FleetCapacity) -> None:
        """The prompt is known: the request waits for `decide` from now on.

        Raises `Overloaded`, and `InvalidInput` for what its tenant's allowance can never cover.
        """
        service_class = ticket.service_class
        refusal = self._tenants.take_tokens(ticket.tenant, work.longest, now)
        if refusal is not None:  # Before it counts as demand: it takes no room from anybody.
            raise self._overloaded(service_class, refusal)
        ticket.tokens_taken = work.longest
        turn_s = self._ttft.turn_s(work, self._places(capacity), capacity)
        self._demand.asked(ticket.tenant.name, turn_s, now)
        settings = self._settings.of(service_class)
        is_full = self._queue.count(service_class) >= settings.queue_max
        needs_room = is_full and self.would_wait(ticket, work, now, capacity)
        longer = self._longer_queue(service_class, ticket.tenant.name)
        if needs_room and longer is None:
            raise self._no_room(ticket, work, self._queue_full(service_class), now, capacity)
        ticket.goes_first = self._goes_first(ticket, now)
        self._check_prediction(ticket, work, now, capacity)
        if needs_room and longer is not None:
            self._displace(longer, service_class, now, capacity)
        ticket.work = work
        ticket.submitted_at = now
        before, found = self._before(ticket, now, capacity), capacity.found_by(ticket.goes_first)
        ticket.wait_s = self._ttft.rough_wait_s(before, found, work.prompt_tokens)
        ticket.move_to(Stage.WAITING)
        self._counts[service_class].arrived -= 1
        self._queue.push(ticket, service_class, ticket.tenant.name, work)
        if settings.ttft_limit_s:
            self._sweep_limits()
            latest = (
                ticket.arrived_at + settings.ttft_limit_s - capacity.least_s(work.prompt_tokens)
            )
            heapq.heappush(self._limits, (latest, next(self._order), ticket))

    def decide(self, now: float, capacity: FleetCapacity) -> Decisions:
        """Grant places to those that are next and fit, and end those whose limit is out of reach.

        To be asked after every other call, and now and then because the fleet changes.
        """
        decisions = Decisions(refused=self._displaced)
        self._displaced = []
        while self._running and self._limits and self._limits[0][0] < now:
            _, _, ticket = heapq.heappop(self._limits)
            if ticket.stage is Stage.WAITING:
                decisions.refused.append((ticket, self._give_up(ticket, now, capacity)))
        places = self._places(capacity)
        while True:
            head = self._next(places, now, capacity)
            if head is None:
                return decisions
            if self._is_too_late(head, now, capacity):
                decisions.refused.append((head, self._give_up(head, now, capacity)))
            else:
                self._grant(head, now, capacity)
                decisions.granted.append(head)

    def dispatched(self, ticket: Ticket) -> None:
        """A worker has been asked, and its load counts the prompt. May be told again."""
        assert ticket.stage is Stage.RUNNING, "who has no place is not dispatched"
        if not ticket.is_dispatched:
            self._count_undispatched(ticket, -1)
            ticket.is_dispatched = True

    def answered(self, ticket: Ticket, prompt_tokens: int, tokens: int, now: float) -> None:
        """So many tokens came, and so many of the prompt had to be computed."""
        assert ticket.stage is Stage.RUNNING, "who has no place is not answered"
        if ticket.answer_tokens_done == 0 and tokens:
            self._ttft.served(ticket.service_s, now - ticket.granted_at, ticket.goes_first)
            ticket.prompt_tokens_done = prompt_tokens
        ticket.answer_tokens_done += tokens

    def end(self, ticket: Ticket, now: float) -> None:
        """The request is over, however far it came."""
        counts = self._counts[ticket.service_class]
        used = 0
        match ticket.stage:
            case Stage.ARRIVED:
                counts.arrived -= 1
            case Stage.WAITING:
                self._queue.remove(ticket, ticket.service_class, ticket.tenant.name)
            case Stage.RUNNING:
                counts.running -= 1
                used = self._give_back(ticket, now)
            case Stage.ENDED:
                raise AssertionError("a request ends once")
        ticket.move_to(Stage.ENDED)
        self._tenants.leave(ticket.tenant, ticket.tokens_taken - used, now)

    # --- figures ----------------------------------------------------------------------------

    def next_limit(self) -> float | None:
        """When the next one that waits has to be ended if it has no place by then."""
        while self._limits and self._limits[0][2].stage is not Stage.WAITING:
            heapq.heappop(self._limits)
        return self._limits[0][0] if self._limits else None

    def snapshot(self, capacity: FleetCapacity) -> AdmissionSnapshot:
        """What was counted."""
        return AdmissionSnapshot(
            classes={each: self._class_snapshot(each) for each in ServiceClass},
            places=self._places(capacity),
            places_taken=self._sequences,
            tenants=len(self._tenants),
            hold_s=self._ttft.hold_s,
        )

    def check_invariants(self, tickets: list[Ticket]) -> None:
        """Assert that the sums are those of `tickets`, which are all that have not ended."""
        running = [ticket for ticket in tickets if ticket.stage is Stage.RUNNING]
        waiting = [ticket for ticket in tickets if ticket.stage is Stage.WAITING]
        assert self._running == len(running) == sum(c.running for c in self._counts.values())
        assert self._sequences == sum(ticket.work.sequences for ticket in running)
        assert self._kv_tokens == sum(ticket.work.kv_tokens for ticket in running)
        assert len(self._queue) == len(waiting)
        assert sum(c.arrived for c in self._counts.values()) == len(tickets) - len(running) - len(
            waiting
        )
        undispatched = [t for t in running if not t.is_dispatched]
        assert self._undispatched_tokens == sum(t.work.prompt_tokens for t in undispatched)
        first = (t.work.prompt_tokens for t in undispatched if t.goes_first)
        assert self._undispatched_first == sum(first)
        assert self._tenants.active == len({ticket.tenant.name for ticket in tickets})
        for tenant in self._tenants:
            own = [ticket for ticket in tickets if ticket.tenant is tenant]
            assert tenant.requests == len(own)
            places = (t.work.sequences for t in own if t.stage is Stage.RUNNING)
            assert tenant.sequences == sum(places)

    def _class_snapshot(self, service_class: ServiceClass) -> ClassSnapshot:
        counts = self._counts[service_class]
        return ClassSnapshot(
            waiting=self._queue.count(service_class) + counts.arrived,
            running=counts.running,
            granted=counts.granted,
            refused={reason: counts.refused[reason] for reason in RefusalReason},
            wait_s_total=counts.wait_s,
            wait_s_max=counts.wait_max_s,
        )

    # --- what fits --------------------------------------------------------------------------

    def _places(self, capacity: FleetCapacity) -> int:
        # Where nobody decodes, a request is to hear that at once, and not to wait.
        return min(capacity.places, self._settings.requests_max) or self._settings.requests_max

    def _may_take(self, tenant: Tenant, places: int, now: float) -> bool:
        """Whether a tenant may have more places, if there are any."""
        return tenant.sequences < self._part(places) or self._free_places(tenant, places, now) > 0

    def _part(self, places: int) -> float:
        """How many places are a tenant's before it may have to leave some to others."""
        return max(1.0, places / len(self._tenants))

    def _free_places(self, tenant: Tenant, places: int, now: float) -> int:
        """For a tenant; below 0 where places have gone, or are kept for others."""
        has_few = tenant.sequences < self._part(places)
        kept = 0 if has_few or len(self._tenants) == 1 else places // _KEPT_SHARE
        if not has_few and len(self._tenants) > 1 and tenant.name in self._demand.crowding(now):
            kept = max(kept, self._wanted_by_others(now))
        return places - kept - self._sequences

    def _wanted_by_others(self, now: float) -> int:
        """Places that tenants which ask for no more than there is may want beside those they have:
        as many as they mostly use at a time, if they come independently of one another."""
        crowding_mean, crowding = self._tenants.sequences_of(self._demand.crowding(now), now)
        mean = max(0.0, self._usual_sequences.mean(now) - crowding_mean)
        return math.ceil(mean + _DEVIATIONS * math.sqrt(mean)) - (self._sequences - crowding)

    def _next(self, places: int, now: float, capacity: FleetCapacity) -> Ticket | None:
        """Who gets its places now: the head if it fits. If it only waits until a worker is free for
        its prompt, one whose prompt goes first does not wait for that."""

        def may_take(name: str) -> bool:
            return self._may_take(self._tenants.known(name), places, now)

        head = self._queue.head(may_take)
        if head is None or self._goes_now(head, places, now, capacity):
            return head
        crowding = self._demand.crowding(now)
        if not crowding or not self._has_room(head.work, places, capacity):
            return None
        first = self._queue.head(lambda name: name not in crowding and may_take(name))
        return first if first and self._goes_now(first, places, now, capacity) else None

    def _goes_now(self, ticket: Ticket, places: int, now: float, capacity: FleetCapacity) -> bool:
        ticket.goes_first = self._goes_first(ticket, now)
        return self._fits(ticket.work, places, capacity, ticket.goes_first)

    def _goes_first(self, ticket: Ticket, now: float) -> bool:
        of_class, name = ticket.service_class, ticket.tenant.name
        return self._demand.is_modest(name, now) or self._queue.goes_first(of_class, name)

    def _fits(self, work: Work, places: int, capacity: FleetCapacity, goes_first: bool) -> bool:
        if self._running == 0:
            return True
        found = capacity.found_by(goes_first)
        on_the_way = self._undispatched_first if goes_first else self._undispatched_tokens
        is_free = found.least_backlog_tokens + on_the_way < self._settings.step_tokens
        return is_free and self._has_room(work, places, capacity)

    def _has_room(self, work: Work, places: int, capacity: FleetCapacity) -> bool:
        kv_tokens = capacity.kv_tokens
        return self._sequences + min(work.sequences, places) <= places and (
            kv_tokens is None or self._kv_tokens + work.kv_tokens <= kv_tokens
        )

    def _grant(self, ticket: Ticket, now: float, capacity: FleetCapacity) -> None:
        name, is_crowded = ticket.tenant.name, bool(self._demand.crowding(now))
        self._queue.serve(ticket, ticket.service_class, name, is_crowded=is_crowded)
        ticket.move_to(Stage.RUNNING)
        ticket.granted_at = now
        self._ttft.waited(ticket.wait_s, now - ticket.submitted_at, ticket.goes_first)
        found = capacity.found_by(ticket.goes_first)
        ticket.service_s = self._ttft.plain_service_s(ticket.work.prompt_tokens, found)
        work = ticket.work
        self._count_sequences(ticket, work.sequences, now)
        self._running += 1
        self._kv_tokens += work.kv_tokens
        self._count_undispatched(ticket, 1)
        counts, wait_s = self._counts[ticket.service_class], now - ticket.submitted_at
        counts.running += 1
        counts.granted += 1
        counts.wait_s += wait_s
        counts.wait_max_s = max(counts.wait_max_s, wait_s)

    def _count_sequences(self, ticket: Ticket, more: int, now: float) -> None:
        ticket.tenant.sequences += more
        ticket.tenant.usual_sequences.now_is(ticket.tenant.sequences, now)
        self._sequences += more
        self._usual_sequences.now_is(self._sequences, now)

    def _count_undispatched(self, ticket: Ticket, times: int) -> None:
        tokens = times * ticket.work.prompt_tokens
        self._undispatched_tokens += tokens
        self._undispatched_first += tokens if ticket.goes_first else 0

    def _give_back(self, ticket: Ticket, now: float) -> int:
        """Places, KV and what was charged too much; the tokens that count for the tenant."""
        work = ticket.work
        if not ticket.is_dispatched:
            self._count_undispatched(ticket, -1)
        self._count_sequences(ticket, -work.sequences, now)
        self._running -= 1
        self._kv_tokens -= work.kv_tokens
        if not ticket.is_dispatched:
            self._queue.settle(ticket.service_class, ticket.tenant.name, -work.tokens)
            return 0
        # A prompt that was given up half way costs its worker nobody knows how much: all of it.
        computed = ticket.prompt_tokens_done or work.prompt_tokens
        done = computed + ticket.answer_tokens_done
        self._queue.settle(ticket.service_class, ticket.tenant.name, done - work.tokens)
        self._ttft.held(now - ticket.granted_at)
        return min(ticket.tokens_taken, work.prompt_len + ticket.answer_tokens_done)

    # --- predictions and refusals -----------------------------------------------------------

    def _before(self, ticket: Ticket, now: float, capacity: FleetCapacity) -> Before:
        """What a request of the same class and tenant finds that comes now."""
        ahead = self._queue.ahead_of_new(ticket.service_class, ticket.tenant.name)
        on_the_way = self._undispatched_first if ticket.goes_first else self._undispatched_tokens
        free = self._free_places(ticket.tenant, self._places(capacity), now)
        return Before(ahead, on_the_way, free)

    def _wait_s(self, ticket: Ticket, work: Work, now: float, capacity: FleetCapacity) -> float:
        before, found = self._before(ticket, now, capacity), capacity.found_by(ticket.goes_first)
        return self._ttft.wait_s(before, found, work.prompt_tokens, ticket.goes_first)

    def _service_s(self, ticket: Ticket, work: Work, capacity: FleetCapacity) -> float:
        found = capacity.found_by(ticket.goes_first)
        return self._ttft.service_s(work.prompt_tokens, found, ticket.goes_first)

    def _check_prediction(
        self, ticket: Ticket, work: Work, now: float, capacity: FleetCapacity
    ) -> None:
        limit_s = self._settings.of(ticket.service_class).ttft_limit_s
        if not limit_s or (self._running == 0 and len(self._queue) == 0):
            return
        wait_s = self._wait_s(ticket, work, now, capacity)
        service_s = self._service_s(ticket, work, capacity)
        predicted_s = now - ticket.arrived_at + wait_s + service_s
        if predicted_s > limit_s:
            raise self._no_room(ticket, work, _beyond_limit(limit_s, predicted_s), now, capacity)

    def _is_too_late(self, ticket: Ticket, now: float, capacity: FleetCapacity) -> bool:
        limit_s = self._settings.of(ticket.service_class).ttft_limit_s
        if not limit_s or self._running == 0:
            return False
        service_s = self._service_s(ticket, ticket.work, capacity)
        return now - ticket.arrived_at + service_s > limit_s

    def _give_up(self, ticket: Ticket, now: float, capacity: FleetCapacity) -> Overloaded:
        """End one that waits: its limit is out of reach."""
        self.end(ticket, now)
        self._ttft.waited(ticket.wait_s, now - ticket.submitted_at, ticket.goes_first)
        limit_s = self._settings.of(ticket.service_class).ttft_limit_s
        wait_s = self._wait_s(ticket, ticket.work, now, capacity)
        service_s = self._service_s(ticket, ticket.work, capacity)
        refusal = _beyond_limit(limit_s, max(limit_s, wait_s + service_s))
        return self._no_room(ticket, ticket.work, refusal, now, capacity)

    def _longer_queue(self, service_class: ServiceClass, tenant: str) -> str | None:
        """Who has to make room in a full queue for another request of `tenant`: the one that has
        most there, if that leaves it no fewer."""
        longest = self._queue.most_waiting(service_class)
        if longest is None:
            return None
        ahead = self._queue.count_of(service_class, longest)
        return longest if ahead > self._queue.count_of(service_class, tenant) + 1 else None

    def _displace(
        self, tenant: str, service_class: ServiceClass, now: float, capacity: FleetCapacity
    ) -> None:
        ticket = self._queue.newest(service_class, tenant)
        self.end(ticket, now)
        full = self._queue_full(service_class)
        error = self._no_room(ticket, ticket.work, full, now, capacity)
        self._displaced.append((ticket, error))

    def _queue_full(self, service_class: ServiceClass) -> Refusal:
        most = self._settings.of(service_class).queue_max
        what = f"{most} requests of class {service_class.value} wait already"
        return Refusal(RefusalReason.QUEUE_FULL, what, 0.0)

    def _no_room(
        self, ticket: Ticket, work: Work, refusal: Refusal, now: float, capacity: FleetCapacity
    ) -> Overloaded:
        """Refused for what others do. Those of a tenant are to ask again one after the other, as
        fast as a part of its share can take them: all at once, most would be refused again."""
        tenant = ticket.tenant
        whole_s = self._ttft.turn_s(work, self._places(capacity), capacity)
        turn_s = max(1, self._tenants.active) * whole_s / _TOLD_SHARE
        at = max(now + refusal.retry_after_s, tenant.told_until) + turn_s
        tenant.told_until = min(at, now + RETRY_AFTER_MAX_S)
        if not self._demand.is_modest(tenant.name, now):
            self._queue.forfeit(ticket.service_class, tenant.name)
        told = replace(refusal, retry_after_s=tenant.told_until - now)
        return self._overloaded(ticket.service_class, told)

    def _overloaded(self, service_class: ServiceClass, refusal: Refusal) -> Overloaded:
        self._counts[service_class].refused[refusal.reason] += 1
        after_s = min(max(refusal.retry_after_s, RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S)
        return Overloaded(refusal.what, round(after_s, 3))

    def _sweep_limits(self) -> None:
        if len(self._limits) > 2 * len(self._queue) + _DEAD_LIMITS_MAX:
            self._limits = [entry for entry in self._limits if entry[2].stage is Stage.WAITING]
            heapq.heapify(self._limits)


def _beyond_limit(limit_s: float, predicted_s: float) -> Refusal:
    what = f"the first token is predicted after {predicted_s:.3g} s, the limit is {limit_s:g} s"
    return Refusal(RefusalReason.TTFT_LIMIT, what, predicted_s - limit_s)
