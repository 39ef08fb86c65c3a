"""Which sequences the next step computes, and how many tokens of each."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from engine.admission import Admission
from engine.itl_limit import ItlLimit
from engine.prompt_order import before, count_passed_over, next_to_admit, turn
from engine.request import Request, Stage
from kvferry.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvferry.config import SchedulerConfig
    from mem_cache.kv_cache import KVCache
    from mem_cache.request_kv import RequestKV


class StepItem(NamedTuple):
    """One sequence of a step: tokens [start, stop) of `request` are computed, and then `draft`, a
    guess at those that follow, if that is all that is known. A tuple, because one is made per
    sequence and step."""

    request: Request
    start: int
    stop: int
    draft: tuple[int, ...] = ()

    @property
    def chooses(self) -> bool:
        """Whether all that is known is computed, so that the next token can be chosen."""
        return self.stop == self.request.num_tokens


@dataclass(frozen=True, slots=True, eq=False)
class _Refusal:
    """The next waiting request did not fit, and when it is worth trying again."""

    request: Request
    changes: int
    slack: int


class Scheduler:
    """The requests of one engine, by stage, in order of arrival.

    A step decodes every decoding request and spends what is left of `chunk_tokens` on prompts, in
    the order of `engine.prompt_order`, by which nobody starves. When slots run out, running
    requests are retracted, youngest first (`engine.admission` says why that ends).
    """

    def __init__(self, kv_cache: KVCache, config: SchedulerConfig) -> None:
        self.counters = {
            "retractions": 0,
            "retracted_tokens_recomputed": 0,
            "steps_sat_out": 0,
            "admissions_tried": 0,
            "holdings_given_up": 0,
            "samples_forked": 0,
            "samples_queued": 0,
        }
        limit_ms = config.itl_limit_ms
        self.itl_limit = ItlLimit(limit_ms / 1000.0) if limit_ms else None
        """None: prompts take what `chunk_tokens` leaves them."""
        self._config = config
        self._kv_cache = kv_cache
        self._admission = Admission(kv_cache, config.output_reserve)
        # In order of arrival.
        self._waiting: list[Request] = []
        self._deferred: list[Request] = []
        # Dicts keep the order of admission and remove in O(1).
        self._expected: dict[int, Request] = {}
        self._loading: dict[RequestKV, Request] = {}
        self._prefilling: dict[int, Request] = {}
        self._decoding: dict[int, Request] = {}
        self._parked: dict[int, Request] = {}
        self._refusal: _Refusal | None = None
        self._changes = 0
        """Counts what may have made room: ends, retractions, changes of stage."""

    # --- load -----------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Requests that take part in steps, or will as soon as their cache is loaded."""
        return len(self._decoding) + len(self._prefilling) + len(self._loading)

    @property
    def waiting(self) -> int:
        """Requests without KV, for which nobody does anything yet."""
        return len(self._waiting) + len(self._deferred)

    @property
    def uncomputed_tokens(self) -> int:
        """Tokens accepted and not yet computed, here or, if that has not begun, elsewhere."""
        lists = (self._prefilling.values(), self._loading.values(), self._waiting, self._deferred)
        return sum(request.uncomputed for requests in lists for request in requests)

    @property
    def horizon(self) -> int:
        """Requests that arrived no later than this are assured: never retracted (again)."""
        return self._admission.horizon

    @property
    def room(self) -> int:
        """Slots that are neither promised to anyone nor kept for anyone."""
        kept = sum(map(self._admission.promised, self._expected.values()))
        return self._admission.slack(self._admitted()) - kept

    # --- arrivals -------------------------------------------------------------------------------

    def enqueue(self, request: Request) -> None:
        """Accept a request. Raises `Overloaded` when the queue is full, `InvalidInput` when
        the request could never run here."""
        self._admission.check_fits_alone(request)
        if len(self._waiting) >= self._config.queue_max:
            raise Overloaded(f"worker queue of {self._config.queue_max} requests is full", 1.0)
        self._queue(request)

    def enqueue_sample(self, request: Request) -> None:
        """Queue a sample of an attempt that was accepted, in its order of arrival."""
        self._queue(request)
        self._changes += 1

    def defer(self, request: Request) -> None:
        """Accept a request whose KV is to come from another worker, see `next_expected`.

        Raises `InvalidInput` when it could never run here.
        """
        self._admission.check_fits_alone(request)
        self._deferred.append(request)

    def next_expected(self) -> Request | None:
        """The oldest deferred request, if its KV may be sent for now: it is expected to fit.

        Room is kept for it from now on, but it holds nothing.
        """
        if not self._deferred:
            return None
        request, expected = self._deferred[0], list(self._expected.values())
        if not self._has_places(request, expected) or self._yields(request):
            return None
        while not self._admission.is_expected_to_fit(request, self._admitted(), expected):
            if not self._give_way():
                return None
        del self._deferred[0]
        request.move_to(Stage.EXPECTED)
        self._expected[id(request)] = request
        return request

    def compute_here(self, request: Request) -> None:
        """The KV of an expected request will not come: queue it, in its order of arrival."""
        del self._expected[id(request)]
        self._queue(request)
        self._changes += 1

    def admit_inbound(self, request: Request) -> bool:
        """Reserve KV for an expected request. False: no space now."""
        if not self._has_places(request) or self._yields(request):
            return False
        if not self._try_open(request):
            return False
        del self._expected[id(request)]
        request.move_to(Stage.INBOUND)
        self._parked[id(request)] = request
        return True

    def admit_returned(self, request: Request) -> bool:
        """Reserve KV for what another worker gives back. False: no room that nobody wants."""
        self._admission.check_fits_alone(request)
        request.move_to(Stage.EXPECTED)
        expected = self._expected.values()
        fits = self._admission.try_open(request, self._admitted(), expected)
        request.move_to(Stage.INBOUND if fits else Stage.ENDED)
        if fits:
            self._parked[id(request)] = request
        return fits

    def hold_cached(self, request: Request) -> bool:
        """Keep what is cached of a request that computes nothing. False: nothing, or no room."""
        fits = self._admission.try_hold(request, self._admitted(), self._expected.values())
        request.move_to(Stage.HELD if fits else Stage.ENDED)
        if fits:
            self._parked[id(request)] = request
        return fits

    # --- progress -------------------------------------------------------------------------------

    def loaded(self, kv: RequestKV) -> Request:
        """What lower tiers held of this request's prefix is there, or will not come."""
        request = self._loading.pop(kv)
        self._start_prefilling(request)
        return request

    def start_decoding(self, request: Request) -> None:
        """The prompt's KV is complete: decode from the next step on."""
        self._prefilling.pop(id(request), None)
        self._parked.pop(id(request), None)
        request.move_to(Stage.DECODING)
        self._decoding[id(request)] = request
        self._changes += 1

    def add_sample(self, parent: Request, sample: Request) -> None:
        """A sample that shares the computed prompt of `parent`: decode it from the next step on
        if it fits, else queue it in its order of arrival. One that has ended only passes by."""
        goes_on = sample.finish_reason() is None
        if goes_on and self._try_fork(parent, sample):
            self.counters["samples_forked"] += 1
            sample.move_to(Stage.DECODING)
            self._decoding[id(sample)] = sample
        else:
            self.counters["samples_queued"] += goes_on
            self._queue(sample)

    def hold(self, request: Request) -> None:
        """The prompt's KV is complete and stays for a handoff to read."""
        del self._prefilling[id(request)]
        request.move_to(Stage.HELD)
        self._parked[id(request)] = request
        self._changes += 1

    def remove(self, request: Request) -> None:
        """Forget a request in any stage. Its KV is the caller's to release."""
        match request.stage:
            case Stage.WAITING:
                (self._waiting if request in self._waiting else self._deferred).remove(request)
            case Stage.EXPECTED:
                del self._expected[id(request)]
            case Stage.LOADING:
                del self._loading[request.held_kv]
            case Stage.PREFILLING:
                del self._prefilling[id(request)]
            case Stage.DECODING:
                del self._decoding[id(request)]
            case Stage.INBOUND | Stage.HELD:
                del self._parked[id(request)]
            case Stage.ENDED:
                raise AssertionError(f"{request.id} has ended already")
        request.move_to(Stage.ENDED)
        self._changes += 1

    # --- the step -------------------------------------------------------------------------------

    def plan(self) -> tuple[list[StepItem], list[Request]]:
        """The next step, for which there are slots, and the requests admitted for it."""
        admitted = self._admit()
        items = self._wanted()
        while self._lacking(items) > 0:
            if self._give_way():
                continue
            victim = self._victim()
            if victim is None:
                items = self._cut_to_fit(items)
                break
            self._retract(victim)
            items = [item for item in items if item.request is not victim]
        computed = (i.request for i in items if i.request.stage is Stage.PREFILLING)
        count_passed_over((*self._waiting, *self._prefilling.values()), computed)
        return items, admitted

    def spare(self, items: Sequence[StepItem]) -> tuple[int, int]:
        """What a planned step leaves to drafts: tokens of its size, and slots that nobody else is
        sure to take. Each may be below 0."""
        tokens = self._config.chunk_tokens - sum(item.stop - item.start for item in items)
        others = [item for item in items if not item.request.prefill_only]
        needed = sum(self._admission.slots_needed(item.request, item.stop) for item in others)
        reserved = self._admission.reserved(self._admitted())
        return tokens, self._admission.available - reserved - needed

    def _admit(self) -> list[Request]:
        """Admit waiting requests while the step has tokens left for them."""
        admitted: list[Request] = []
        while (request := self._admit_next()) is not None:
            if request.stage is Stage.PREFILLING:
                admitted.append(request)
        return admitted

    def _admit_next(self) -> Request | None:
        """Admit who goes first, or the oldest if that one cannot be. Who has been refused for
        lack of room is not overtaken until he is let in."""
        if not self._waiting or self._is_still_refused(self._waiting[0], self._admitted()):
            return None
        for request in dict.fromkeys((next_to_admit(self._waiting), self._waiting[0])):
            budget = self._prefill_budget - before(request, self._prefilling.values())
            if budget > 0 and self._try_admit(request):
                return request
        return None

    def _wanted(self) -> list[StepItem]:
        """The step as it is if there are slots."""
        items = [
            StepItem(request, request.num_tokens - 1, request.num_tokens)
            for request in self._decoding.values()
        ]
        budget = self._prefill_budget
        for request in sorted(self._prefilling.values(), key=turn):
            if budget == 0:
                break
            tokens = min(budget, request.uncomputed)
            start = request.held_kv.committed_len
            items.append(StepItem(request, start, start + tokens))
            budget -= tokens
        return items

    def _lacking(self, items: list[StepItem]) -> int:
        """Slots that the step needs beyond those it may take."""
        others = fixed = 0
        for item in items:
            needed = self._admission.slots_needed(item.request, item.stop)
            fixed += needed if item.request.prefill_only else 0
            others += 0 if item.request.prefill_only else needed
        if others + fixed == 0:
            return 0
        # What prompts for other workers take in this step is part of what is reserved for them.
        return others + self._admission.reserved(self._admitted()) - self._admission.available

    def _victim(self) -> Request | None:
        """The youngest request that may lose its KV. Never the oldest, nor an assured one."""
        running = [*self._decoding.values(), *self._prefilling.values()]
        ages = sorted((r for r in running if r.is_retractable), key=_arrival)
        if len(ages) < 2 or ages[-1].arrival <= self.horizon:
            return None
        return ages[-1]

    def _retract(self, request: Request) -> None:
        self._admission.retract(request)
        running = self._decoding if request.stage is Stage.DECODING else self._prefilling
        del running[id(request)]
        self._queue(request)
        self.counters["retractions"] += 1
        self._changes += 1

    def _cut_to_fit(self, items: list[StepItem]) -> list[StepItem]:
        """The part of a step that there are slots for; older requests come first.

        Only requests whose KV cannot be taken are in the way: handoffs and copies, all of which
        end by a deadline. Prompts computed for others have their slots reserved.
        """
        free = self._admission.available
        left = max(0, free - self._admission.reserved(self._admitted()))
        kept: list[StepItem] = []
        for item in sorted(items, key=lambda item: item.request.arrival):
            request = item.request
            room = free if request.prefill_only else min(left, free)
            stop = min(item.stop, request.held_kv.allocated_len + room)
            if stop <= item.start:
                self.counters["steps_sat_out"] += 1
                continue
            taken = self._admission.slots_needed(request, stop)
            free -= taken
            left -= 0 if request.prefill_only else taken
            kept.append(StepItem(request, item.start, stop))
        others = self._parked or self._loading or self._kv_cache.copies_in_flight
        assert kept or others, (
            f"nobody fits and nobody is in the way\n{self._kv_cache.oom_report()}"
        )
        return kept

    # --- inside ---------------------------------------------------------------------------------

    @property
    def _prefill_budget(self) -> int:
        """Prompt tokens that a step may compute."""
        most = max(self._config.chunk_tokens - len(self._decoding), 1)
        if self.itl_limit is None:
            return most
        return self.itl_limit.prompt_tokens(
            self._decoding.values(), self._prefilling.values(), most
        )

    @property
    def _occupied(self) -> int:
        """Samples that decode, or will without asking again."""
        parked = self._parked.values()
        inbound = [r for r in parked if r.stage is Stage.INBOUND and r.give_way is None]
        to_come = (inbound, self._prefilling.values(), self._loading.values())
        forks = sum(request.forks_due for requests in to_come for request in requests)
        return self.running + len(inbound) + forks

    def _has_places(self, request: Request, expected: Iterable[Request] = ()) -> bool:
        """Whether all its samples may decode beside those that do, or are `expected` to. Where
        they would not even fit alone, the others wait once it is there."""
        most = self._config.running_max
        taken = self._occupied + sum(1 + other.forks_due for other in expected)
        return taken + min(1 + request.forks_due, most) <= most

    @property
    def is_empty(self) -> bool:
        """Whether no request is in any stage."""
        return not (self.waiting or self._expected or self._admitted())

    @property
    def holding(self) -> int:
        """Requests that hold KV."""
        return len(self._admitted())

    def _admitted(self) -> list[Request]:
        """Every request that holds KV."""
        lists = (self._parked, self._loading, self._decoding, self._prefilling)
        return [request for requests in lists for request in requests.values()]

    def _expected_before(self, request: Request) -> list[Request]:
        return [other for other in self._expected.values() if other.arrival < request.arrival]

    def _queue(self, request: Request) -> None:
        if request.stage is not Stage.WAITING:
            request.move_to(Stage.WAITING)
        bisect.insort(self._waiting, request, key=_arrival)

    def _yields(self, inbound: Request) -> bool:
        """Whether somebody who waits for room goes before a request of another worker's KV."""
        oldest = self._waiting[0] if self._waiting else None
        is_older = oldest is not None and oldest.arrival < inbound.arrival
        # Beside the places that an older one needs, all at once.
        if oldest is not None and is_older and not self._has_places(inbound, [oldest]):
            return True
        refusal = self._refusal
        if refusal is not None and refusal.request is oldest:
            return is_older or self._has_retracted()
        return self._has_retracted()

    def _comes_after_deferred(self, request: Request) -> bool:
        """Whether an older request of another worker's KV still waits for room, and would get it
        before this one: none does while somebody who was retracted waits."""
        is_younger = bool(self._deferred) and self._deferred[0].arrival < request.arrival
        return is_younger and not self._has_retracted()

    def _has_retracted(self) -> bool:
        return any(request.retractions for request in self._waiting)

    def _try_admit(self, request: Request) -> bool:
        """Admit one of those that wait. False: not now."""
        if not self._has_places(request) or self._comes_after_deferred(request):
            return False
        if self._is_still_refused(request, self._admitted()):
            return False
        self.counters["admissions_tried"] += 1
        if not self._try_open(request):
            slack = self._admission.slack(self._admitted())
            self._refusal = _Refusal(request, self._changes, slack)
            return False
        self._refusal = None
        self._waiting.remove(request)
        if self._admission.load_back(request):
            request.move_to(Stage.LOADING)
            self._loading[request.held_kv] = request
        else:
            self._start_prefilling(request)
        return True

    def _try_open(self, request: Request) -> bool:
        """Open a request that is the next in its order; those that hold KV for nobody give way."""
        expected = self._expected_before(request)
        while not self._admission.try_open(request, self._admitted(), expected):
            if not self._give_way():
                return False
        return True

    def _try_fork(self, parent: Request, sample: Request) -> bool:
        """Fork a sample; those that hold KV for nobody give way."""
        if self._occupied >= self._config.running_max:
            return False
        while not self._admission.try_fork(parent, sample, self._admitted()):
            if not self._give_way():
                return False
        return True

    def _give_way(self) -> bool:
        """End the youngest request whose KV is in nobody's way; False if there is none."""
        for request in reversed(self._parked.values()):
            if request.give_way is not None:
                self.counters["holdings_given_up"] += 1
                request.give_way()
                assert request.stage is Stage.ENDED, f"{request.id} did not give way"
                return True
        return False

    def _is_still_refused(self, request: Request, admitted: list[Request]) -> bool:
        """Whether trying again is idle: opening a request matches, locks and may split edges."""
        refusal = self._refusal
        if refusal is None or refusal.request is not request or refusal.changes != self._changes:
            return False
        return self._admission.slack(admitted) <= refusal.slack

    def _start_prefilling(self, request: Request) -> None:
        request.move_to(Stage.PREFILLING)
        self._prefilling[id(request)] = request
        again = max(0, request.retracted_len - request.held_kv.prefix_len)
        self.counters["retracted_tokens_recomputed"] += again
        self._changes += 1


def _arrival(request: Request) -> int:
    return request.arrival
