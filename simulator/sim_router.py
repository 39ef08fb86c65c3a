"""A router in simulated time: the product's own index, load book, choice and admission.

What is asynchronous in `router.fleet`, `router.waiting_room` and `router.attempts` is done by
events here, in the same order: events of caches arrive `event_delay_s` late, statuses are as old as
their last call, and whoever waits for a place is looked at when one comes free and every 50 ms.
"""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvferry.errors import KvferryError, WorkerUnavailable
from kvferry.ids import ExtraKey
from kvferry.membership import Role
from router.admission import Admission
from router.admission_settings import AdmissionSettings
from router.fleet_capacity import FleetCapacity, fleet_capacity, uncached_tokens
from router.load import LoadBook
from router.policy import ClusterView, Demand, Roster, WorkersView
from router.prefix_index import EventGap, PrefixIndex
from router.prompt_keys import prompt_keys
from router.route_chooser import RouteChooser
from router.ticket import Stage
from router.work import Work

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvferry.accounts import KvAccounts, WorkerLoad
    from kvferry.ids import WorkerId
    from kvferry.kv_events import KvEventBatch
    from kvferry.membership import WorkerInfo
    from router.load import DispatchTicket
    from router.policy import CostModel, Route, Weighing
    from router.ticket import Ticket
    from simulator.attempt import SimRequest
    from simulator.event_queue import EventQueue
    from simulator.settings import SimSettings

_LOOK_S = 0.05
"""As of `router.waiting_room`."""
_ANSWER_TOKENS_EXPECTED = 128
"""As of `router.work`."""
_NOBODY: frozenset[WorkerId] = frozenset()
_SHARED = ExtraKey("")


class RouterEnds(Protocol):
    """Who carries out what a router decides."""

    def weighed(self, request: SimRequest, weighing: Weighing, route: Route) -> None:
        """This was chosen, of all that."""
        ...

    def placed(self, request: SimRequest, route: Route, ticket: DispatchTicket) -> None:
        """It goes there."""
        ...

    def refused(self, request: SimRequest, error: KvferryError) -> None:
        """It gets no place."""
        ...

    def lost_track(self, router: SimRouter, worker_id: WorkerId) -> None:
        """Events are missing: the worker is to send a snapshot."""
        ...


class SimRouter:
    """One router replica."""

    def __init__(
        self,
        number: int,
        settings: SimSettings,
        model: CostModel,
        queue: EventQueue,
        ends: RouterEnds,
    ) -> None:
        self.number = number
        self.decisions = 0
        self.events_applied = 0
        self._settings = settings
        self._queue = queue
        self._ends = ends
        self._chooser = RouteChooser(settings.policy, model, settings.page_size, queue)
        self._loads = LoadBook()
        self._prefill_index = PrefixIndex(on_expected=self._chooser.expect)
        self._decode_index = PrefixIndex(on_expected=self._chooser.expect)
        self._admission = Admission(
            AdmissionSettings(
                settings.classes, settings.tenants, settings.requests_max, settings.chunk_tokens
            )
        )
        self._rng = random.Random(f"{settings.seed}/{number}")
        self._members: dict[WorkerId, WorkerInfo] = {}
        self._roster = Roster.of(())
        self._prefillers = 0
        self._rows: NDArray[np.intp] = np.empty(0, dtype=np.intp)
        self._numbers: tuple[NDArray[np.intp], NDArray[np.intp]] = (self._rows, self._rows)
        self._capacity: tuple[int, FleetCapacity] | None = None
        self._slots_max = 0
        """Of those that have reported."""
        self._news: deque[tuple[float, KvEventBatch]] = deque()
        self._waiting: dict[Ticket, SimRequest] = {}
        self._is_looking = False

    # --- workers --------------------------------------------------------------------------------

    def join(self, infos: Sequence[WorkerInfo]) -> None:
        """These may be chosen from now on."""
        for info in infos:
            self._loads.add(info.worker_id, self._queue.time)
            self._index_of(info.role).join(info.worker_id, info.incarnation)
            self._members[info.worker_id] = info
        self._workers_changed()

    def leave(self, worker_id: WorkerId) -> None:
        """It may not be chosen any more, and nothing it holds counts."""
        info = self._members.pop(worker_id)
        self._loads.remove(worker_id)
        self._index_of(info.role).leave(worker_id)
        self._workers_changed()

    def report(self, worker_id: WorkerId, load: WorkerLoad, accounts: KvAccounts) -> None:
        """The answer to a status call."""
        self._loads.report(worker_id, self._queue.time, load, accounts)
        self._slots_max = max(self._slots_max, accounts.total)

    def hear(self, batch: KvEventBatch, at: float) -> None:
        """Events of a worker, which arrive `at` that time; not before any that came before."""
        self._news.append((at, batch))

    def _index_of(self, role: Role) -> PrefixIndex:
        return self._prefill_index if role is Role.PREFILL else self._decode_index

    def _workers_changed(self) -> None:
        infos = sorted(self._members.values(), key=lambda info: info.role is not Role.PREFILL)
        names = [info.worker_id for info in infos]
        self._roster = Roster.of(infos)
        self._prefillers = sum(info.role is Role.PREFILL for info in infos)
        self._rows = self._loads.rows_of(names)
        self._numbers = self._prefill_index.numbers_of(names), self._decode_index.numbers_of(names)
        self._capacity = None

    def _catch_up(self) -> None:
        """Take the events that have arrived."""
        while self._news and self._news[0][0] <= self._queue.time:
            _, batch = self._news.popleft()
            info = self._members.get(batch.worker_id)
            if info is None:
                continue
            self.events_applied += 1
            try:
                self._index_of(info.role).apply(batch)
            except EventGap:
                self._ends.lost_track(self, batch.worker_id)

    # --- requests -------------------------------------------------------------------------------

    def arrive(self, request: SimRequest) -> None:
        """A client's request: its prompt is being tokenized."""
        asked = request.asked
        try:
            request.place = self._admission.arrive(
                asked.service_class, asked.tenant, self._queue.time, self._capacity_now()
            )
        except KvferryError as error:
            self._ends.refused(request, error)

    def submit(self, request: SimRequest) -> None:
        """The prompt is known: it waits for a place."""
        ticket, now = request.place, self._queue.time
        assert ticket is not None, "a request arrives before it is submitted"
        try:
            self._submit(ticket, request, now)
        except KvferryError as error:
            self._admission.end(ticket, now)
            self._ends.refused(request, error)
            return
        self._waiting[ticket] = request
        self.look()

    def _submit(self, ticket: Ticket, request: SimRequest, now: float) -> None:
        work, capacity = self._work_of(request, request.asked.prompt_tokens), self._capacity_now()
        if self._admission.would_wait(ticket, work, now, capacity):
            hashes, _ = self._hashes_of(request)
            view = self.view(hashes)
            work = self._work_of(request, uncached_tokens(view, request.asked.prompt_tokens))
        self._admission.submit(ticket, work, now, capacity)

    def _work_of(self, request: SimRequest, uncached: int) -> Work:
        """As `router.work` makes it; nobody asks for more tokens than the answer has."""
        prompt, answer = request.asked.prompt_tokens, request.asked.answer_tokens
        return Work(
            prompt_tokens=uncached,
            answer_tokens=min(answer, _ANSWER_TOKENS_EXPECTED),
            kv_tokens=uncached + round(self._settings.output_reserve * answer),
            prompt_len=prompt,
            longest=prompt + answer,
        )

    def look(self) -> None:
        """Who waits may have a place by now."""
        if not self._waiting:
            return
        decisions = self._admission.decide(self._queue.time, self._capacity_now())
        for ticket, error in decisions.refused:
            self._ends.refused(self._waiting.pop(ticket), error)
        for ticket in decisions.granted:
            self.place(self._waiting.pop(ticket))
        if self._waiting and not self._is_looking:
            self._is_looking = True
            self._queue.after(_LOOK_S, self._look_again)

    def _look_again(self) -> None:
        self._is_looking = False
        self.look()

    def place(self, request: SimRequest, avoid: frozenset[WorkerId] = _NOBODY) -> None:
        """Choose workers for a request that has a place, and count it at them."""
        hashes, tokens = self._hashes_of(request)
        demand = Demand(tokens, request.answer_left)
        try:
            weighing = self._chooser.weigh(self.view(hashes), demand, hashes, avoid)
        except WorkerUnavailable as error:
            self.end(request)
            self._ends.refused(request, error)
            return
        route = self._chooser.take(weighing, self._rng)
        self._ends.weighed(request, weighing, route)
        self.decisions += 1
        ticket = self._loads.dispatch(
            self._queue.time,
            prefill=route.computing.worker_id,
            decode=route.decode.worker_id,
            prefill_tokens=route.prefill_tokens,
            kv_tokens=tokens + request.answer_left,
        )
        assert request.place is not None, "it has a place"
        self._admission.dispatched(request.place)
        self._ends.placed(request, route, ticket)

    def view(self, hashes: NDArray[np.uint64]) -> ClusterView:
        """The workers, and what they hold of a prompt, as far as this router knows."""
        self._catch_up()
        hits = np.zeros(len(self._roster), dtype=np.int64)
        for index, numbers in zip(
            (self._prefill_index, self._decode_index), self._numbers, strict=True
        ):
            index.note_hits(hashes, numbers, self._settings.page_size, hits)
        loads = self._loads.loads(self._rows)
        return ClusterView(WorkersView(self._roster, hits, loads), self._prefillers)

    def prefilled(
        self, request: SimRequest, ticket: DispatchTicket, computed: int, new: int
    ) -> None:
        """An attempt gives its first tokens, `new` ones; of the prompt it computed so many."""
        self._loads.prefilled(ticket)
        assert request.place is not None, "it has a place"
        self._admission.answered(request.place, computed, new, self._queue.time)
        self.look()

    def attempt_ended(self, ticket: DispatchTicket) -> None:
        """However it ended."""
        self._loads.end(ticket)

    def end(self, request: SimRequest, more_tokens: int = 0) -> None:
        """The request is over, with so many tokens that nobody told of yet."""
        place, now = request.place, self._queue.time
        if place is not None and place.stage is not Stage.ENDED:
            if more_tokens:
                self._admission.answered(place, 0, more_tokens, now)
            self._admission.end(place, now)
        self.look()

    def _hashes_of(self, request: SimRequest) -> tuple[NDArray[np.uint64], int]:
        """Of the blocks of what is known of it, and how many tokens that are."""
        tokens = request.known
        return prompt_keys(request.ids[: tokens // self._settings.page_size], 1, _SHARED), tokens

    def _capacity_now(self) -> FleetCapacity:
        changes = self._loads.changes
        if self._capacity is None or self._capacity[0] != changes:
            # Of those that only decode no more is asked for than how many they are.
            computing = self._prefillers or len(self._roster)
            loads = self._loads.loads(self._rows[:computing])
            decoders, slots = len(self._roster) - self._prefillers, self._slots_max or None
            running_max = self._settings.running_max
            self._capacity = changes, fleet_capacity(loads, decoders, running_max, slots)
        return self._capacity[1]
