"""A cluster in simulated time: clients, routers, workers, and what becomes of requests."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

import numpy as np

from kvferry.accounts import KvAccounts
from kvferry.errors import InvalidInput
from kvferry.ids import Incarnation, WorkerId
from kvferry.membership import Role, WorkerInfo
from router.policy import CostModel
from router.route_explanation import explain
from simulator.attempt import Attempt, SimRequest
from simulator.cache_news import CacheNews
from simulator.event_queue import EventQueue
from simulator.handoffs import Handoffs
from simulator.held_request import HeldRequest
from simulator.host import Host
from simulator.page_cache import page_cache
from simulator.page_ids import AnswerPages
from simulator.run_columns import RunColumns
from simulator.sim_router import SimRouter
from simulator.worker import SimWorker

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvferry.errors import KvferryError
    from router.load import DispatchTicket
    from router.policy import Route, Weighing
    from router.route_explanation import Explanation
    from simulator.attempt import Asked
    from simulator.settings import SimSettings, WorkerDeath
    from simulator.step_times import StepTimes

_SWEEPS = 16
"""Parts of the workers that report one after the other within an interval."""


class Simulation:
    """One run. Equal settings, times and requests give equal runs."""

    def __init__(self, settings: SimSettings, times: StepTimes, context_tokens: int) -> None:
        """`context_tokens`: of the longest request, prompt and answer."""
        settings.check()
        self.queue = EventQueue()
        self.news = CacheNews(settings, self.queue)
        self.columns = RunColumns()
        self.failovers = 0
        self.explained: int | None = None
        """Index of the request whose choices are to be explained..."""
        self.explanations: list[tuple[float, Explanation]] = []
        """...and why its attempts went where they went, with the times of these choices."""
        self._settings = settings
        self._times = times
        self._context_pages = context_tokens // settings.page_size + 2
        self._handoffs = Handoffs(times, self.queue, self)
        self.workers: dict[WorkerId, SimWorker] = {}
        """Those that live."""
        self._named: dict[WorkerId, SimWorker] = {}
        """The last one of each name."""
        self._attempts: dict[SimWorker, dict[Attempt, None]] = {}
        """Under way, by each worker that takes part."""
        self._incarnations = itertools.count(1)
        self._hosts: dict[WorkerId, Host] = {}
        host = Host(times)
        for number, info in enumerate(_infos(settings)):
            if number % settings.workers_per_host == 0:
                host = Host(times)
            self._hosts[info.worker_id] = host
            self._start(info)
        self.routers = self._routers()
        self._quiet: set[WorkerId] = set()
        """Workers that were idle when they reported, and were sent nothing since: they would say
        the same again."""
        self._answers = AnswerPages()
        self._arrivals = 0
        self._open = 0
        self._coming: Iterator[Asked] = iter(())
        self._is_coming = False

    def run(
        self,
        coming: Iterator[Asked],
        deaths: Sequence[WorkerDeath] = (),
        until_s: float = math.inf,
    ) -> RunColumns:
        """Play requests, in the order of their times; ends when all have, or at `until_s`."""
        self._coming, self._is_coming = coming, True
        self._next_arrival()
        for death in deaths:
            self.queue.at(death.at_s, self._die, death)
        for part in range(_SWEEPS):
            self.queue.at(part * self._settings.status_interval_s / _SWEEPS, self._report, part)
        while (self._open or self._is_coming) and self.queue.time < until_s:
            if not self.queue.step():
                break
        return self.columns

    def check_idle(self) -> None:
        """Assert that no worker holds anything for a request, down to the last page."""
        while any(worker.requests for worker in self.workers.values()):
            assert self.queue.step(), "nothing happens any more, and workers hold requests"
        for worker in self.workers.values():
            worker.kv.check_idle()

    def host_of(self, worker_id: WorkerId) -> Host:
        """The machine of a worker."""
        return self._hosts[worker_id]

    # --- clients --------------------------------------------------------------------------------

    def _next_arrival(self) -> None:
        asked = next(self._coming, None)
        if asked is None:
            self._is_coming = False
            return
        self.queue.at(asked.at_s, self._arrive, asked)

    def _arrive(self, asked: Asked) -> None:
        number = asked.index % len(self.routers)
        router = self.routers[number]
        request = SimRequest(asked, number, asked.ids, known=asked.prompt_tokens)
        self._open += 1
        if self._fits_alone(asked):
            router.arrive(request)
        else:
            # As `engine.admission` has it: no worker could hold it, however long it waited.
            self.refused(request, InvalidInput("max_tokens", "needs more KV than a worker has"))
        if request.place is not None:
            times = self._times
            ready_s = times.request_s + times.tokenize_token_s * asked.prompt_tokens
            self.queue.after(ready_s, router.submit, request)
        self._next_arrival()

    def _fits_alone(self, asked: Asked) -> bool:
        page = self._settings.page_size
        longest = asked.prompt_tokens + asked.answer_tokens - 1
        return -(-longest // page) <= self._settings.kv_tokens // page

    def refused(self, request: SimRequest, error: KvferryError) -> None:
        """As of `RouterEnds`."""
        request.outcome = "failed" if request.attempts else "refused"
        request.error = error.kind.value
        self._close(request)

    def _close(self, request: SimRequest) -> None:
        """Nothing more becomes of it."""
        self._open -= 1
        request.end_s = self.queue.time
        self.columns.add(request)

    def weighed(self, request: SimRequest, weighing: Weighing, route: Route) -> None:
        """As of `RouterEnds`."""
        if request.asked.index == self.explained:
            self.explanations.append((self.queue.time, explain(weighing, route)))

    def placed(self, request: SimRequest, route: Route, ticket: DispatchTicket) -> None:
        """As of `RouterEnds`."""
        request.attempts += 1
        request.decode_worker = route.decode.worker_id
        request.prefill_worker = route.computing.worker_id
        attempt = self._attempt(request, route, ticket)
        for worker in attempt.workers:
            self._attempts[worker][attempt] = None
        self._quiet -= route.workers
        self._handoffs.begin(attempt)

    def _attempt(self, request: SimRequest, route: Route, ticket: DispatchTicket) -> Attempt:
        # A worker may have died of which its router has not heard: nobody answers there.
        sink = self._named[route.decode.worker_id]
        source = None if route.prefill is None else self._named[route.prefill.worker_id]
        attempt = Attempt(request, ticket, sink, source)
        # What an answer that goes on knows is all there, but its last token, by which it goes on.
        is_resumed = request.known > request.asked.prompt_tokens
        known = request.known - (is_resumed and source is not None)
        attempt.sides.append(self._held(attempt, known, is_for_other=False))
        if source is not None:
            attempt.sides.append(self._held(attempt, known, is_for_other=True))
        return attempt

    def _held(self, attempt: Attempt, known: int, *, is_for_other: bool) -> HeldRequest:
        self._arrivals += 1
        request, page = attempt.request, self._settings.page_size
        longest = request.asked.prompt_tokens + request.asked.answer_tokens - 1
        share = math.ceil(self._settings.output_reserve * request.answer_left)
        promised = known if is_for_other else min(longest, known + share)
        return HeldRequest(
            attempt=attempt,
            arrival=self._arrivals,
            ids=request.ids,
            known=known,
            longest=known if is_for_other else max(longest, known),
            promise=-(-promised // page),
            is_for_other=is_for_other,
        )

    def first_token(self, attempt: Attempt, held: HeldRequest) -> None:
        """As of `AttemptEnds`."""
        request = attempt.request
        if attempt.is_over:
            return
        if request.first_token_s is None:
            request.first_token_s = self.queue.time
        # Of an answer that goes on, what comes next is known already.
        new = int(held.known >= request.known)
        request.known += new
        computed = max(1, held.known - held.hit)
        self.routers[request.router].prefilled(request, attempt.ticket, computed, new)

    def ended(self, attempt: Attempt) -> None:
        """As of `AttemptEnds`."""
        if attempt.is_over:
            return
        request = attempt.request
        if request.first_token_s is None:
            # All of a short answer comes in one message.
            request.first_token_s = self.queue.time
        more = request.answer_left
        request.known += more
        request.outcome = "done"
        self._over(attempt)
        # Nothing is left of it when the last message about it has come: no cycle of references.
        attempt.sides.clear()
        self._close(request)
        self.routers[request.router].end(request, more)

    def _over(self, attempt: Attempt) -> None:
        attempt.is_over = True
        for worker in attempt.workers:
            self._attempts.get(worker, {}).pop(attempt, None)
        self.routers[attempt.request.router].attempt_ended(attempt.ticket)

    # --- faults ---------------------------------------------------------------------------------

    def _die(self, death: WorkerDeath) -> None:
        """A process is gone at once, and is missed a little later."""
        worker = self.workers.pop(death.worker_id, None)
        if worker is None:
            return
        for attempt in self._attempts[worker]:
            if attempt.sink is worker:
                told = worker.tokens_told(attempt.at_sink)
                attempt.request.known = max(attempt.request.known, told)
        worker.die()
        self.queue.after(self._settings.missed_after_s, self._miss, worker)
        if death.back_after_s is not None:
            back_after_s = max(death.back_after_s, self._settings.missed_after_s)
            self.queue.after(back_after_s, self._restart, worker.info)

    def _miss(self, worker: SimWorker) -> None:
        """Routers are told, and have its attempts go on elsewhere."""
        name = worker.info.worker_id
        for router in self.routers:
            router.leave(name)
        for attempt in tuple(self._attempts.pop(worker)):
            self._go_on_elsewhere(attempt, name)

    def _go_on_elsewhere(self, attempt: Attempt, without: WorkerId) -> None:
        request = attempt.request
        if attempt.is_moved and attempt.sink.info.worker_id != without:
            # Who computed the prompt is not needed any more.
            return
        self._over(attempt)
        for worker, held in zip(attempt.workers, attempt.sides, strict=True):
            if not worker.is_dead:
                worker.abort(held)
        self.failovers += 1
        self._name_answer(request)
        self.routers[request.router].place(request, frozenset({without}))

    def _name_answer(self, request: SimRequest) -> None:
        """The pages that its answer has filled so far have ids of their own."""
        full = request.known // self._settings.page_size
        lacking = full + 1 - request.ids.size
        if lacking > 0:
            # The last id stands for no full page.
            own = self._answers.take(lacking + 1)
            request.ids = np.concatenate((request.ids[:-1], own))

    def _restart(self, info: WorkerInfo) -> None:
        """Another process of the same name, which holds nothing."""
        worker = self._start(info)
        for router in self.routers:
            router.join([worker.info])
            self.news.snapshot(router, worker, 0.0)

    # --- workers and routers --------------------------------------------------------------------

    def _start(self, info: WorkerInfo) -> SimWorker:
        settings = self._settings
        pages = settings.kv_tokens // settings.page_size
        cache = page_cache(pages, settings.rows, self._context_pages, settings.eviction)
        info = dataclasses.replace(info, incarnation=Incarnation(next(self._incarnations)))
        host = self._hosts[info.worker_id]
        worker = SimWorker(
            info, cache, settings.places, host, self.queue, self._handoffs, self.news
        )
        self.workers[info.worker_id] = self._named[info.worker_id] = worker
        self._attempts[worker] = {}
        return worker

    def _routers(self) -> list[SimRouter]:
        settings, times = self._settings, self._times
        model = CostModel(
            kv_bytes_per_token=times.kv_bytes_per_token,
            running_max=settings.running_max,
            local_prefill_tokens_max=settings.local_prefill_tokens_max,
        )
        routers = [
            SimRouter(number, settings, model, self.queue, self)
            for number in range(settings.routers)
        ]
        for router in routers:
            router.join([worker.info for worker in self.workers.values()])
            for worker in self.workers.values():
                self.news.snapshot(router, worker, 0.0)
        self.news.routers = routers
        return routers

    def lost_track(self, router: SimRouter, worker_id: WorkerId) -> None:
        """As of `RouterEnds`."""
        worker = self.workers.get(worker_id)
        if worker is not None:
            self.news.repair(router, worker)

    def _report(self, part: int) -> None:
        quiet = self._quiet
        for worker in tuple(self.workers.values())[part::_SWEEPS]:
            name = worker.info.worker_id
            self.news.mark(worker)
            if worker.is_idle:
                if name in quiet:
                    continue
                quiet.add(name)
            load, accounts = worker.load(), self._in_tokens(worker)
            for router in self.routers:
                router.report(name, load, accounts)
        self.queue.after(self._settings.status_interval_s, self._report, part)

    def _in_tokens(self, worker: SimWorker) -> KvAccounts:
        cache, page = worker.kv.cache, self._settings.page_size
        free, evictable = cache.allocator.num_free, cache.tree.evictable_size()
        held = cache.num_slots - free - evictable
        return KvAccounts(
            free * page, evictable * page, held * page, 0, 0, cache.num_slots * page, 0, 0, 0
        )


def _infos(settings: SimSettings) -> Iterator[WorkerInfo]:
    roles = [Role.PREFILL] * settings.prefill + [Role.DECODE] * settings.decode
    roles += [Role.BOTH] * settings.both
    for number, role in enumerate(roles):
        yield WorkerInfo(WorkerId(f"{role.value}-{number}"), role, Incarnation(0), "")
