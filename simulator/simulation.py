"""A cluster in simulated time: clients, routers, workers, links, and what goes between them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.accounts import KvAccounts
from kvferry.ids import Incarnation, WorkerId
from kvferry.kv_events import BlocksStored, KvEventBatch
from kvferry.membership import Role, WorkerInfo
from router.policy import CostModel
from simulator.attempt import Attempt, SimRequest
from simulator.event_queue import EventQueue
from simulator.held_request import HeldRequest
from simulator.page_cache import page_cache
from simulator.run_columns import RunColumns
from simulator.sim_router import SimRouter
from simulator.worker import SimWorker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvferry.errors import KvferryError
    from kvferry.kv_events import KvEvent
    from router.load import DispatchTicket
    from router.policy import Route
    from simulator.attempt import Asked
    from simulator.settings import SimSettings
    from simulator.step_times import StepTimes

_SWEEPS = 16
"""Parts of the workers that report one after the other within an interval."""


@dataclass(slots=True)
class Counts:
    """What happened."""

    kv_batches: int = 0
    batches_lost: int = 0
    snapshots: int = 0


class Simulation:
    """One run. Equal settings, times and requests give equal runs."""

    def __init__(self, settings: SimSettings, times: StepTimes, context_tokens: int) -> None:
        """`context_tokens`: of the longest request, prompt and answer."""
        settings.check()
        self.queue = EventQueue()
        self.counts = Counts()
        self._settings = settings
        self._times = times
        self._context_pages = context_tokens // settings.page_size + 2
        self.workers = {info.worker_id: self._worker(info) for info in _infos(settings)}
        self._sequences = dict.fromkeys(self.workers, 0)
        model = CostModel(
            kv_bytes_per_token=times.kv_bytes_per_token,
            running_max=settings.running_max,
            local_prefill_tokens_max=settings.local_prefill_tokens_max,
        )
        self.routers = [
            SimRouter(number, settings, model, self.queue, self)
            for number in range(settings.routers)
        ]
        for router in self.routers:
            router.join([worker.info for worker in self.workers.values()])
            for worker in self.workers.values():
                self._send_snapshot(router, worker, 0.0)
        self._quiet: set[WorkerId] = set()
        """Workers that were idle when they reported, and were sent nothing since: they would say
        the same again."""
        self._arrivals = 0
        self._open = 0
        self._coming: Iterator[Asked] = iter(())
        self._is_coming = False
        self.columns = RunColumns()

    def run(self, coming: Iterator[Asked], until_s: float = math.inf) -> RunColumns:
        """Play requests, in the order of their times; ends when all have, or at `until_s`."""
        self._coming, self._is_coming = coming, True
        self._next_arrival()
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
            assert worker.requests == 0, f"{worker.info.worker_id} still has {worker.requests}"
            worker.kv.check_idle()

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
        request = SimRequest(asked, number, known=asked.prompt_tokens)
        self._open += 1
        router.arrive(request)
        if request.place is not None:
            times = self._times
            ready_s = times.request_s + times.tokenize_token_s * asked.prompt_tokens
            self.queue.after(ready_s, router.submit, request)
        self._next_arrival()

    def refused(self, request: SimRequest, error: KvferryError) -> None:
        """As of `RouterEnds`."""
        request.outcome, request.error = "refused", error.kind.value
        request.end_s = self.queue.time
        self._close(request)

    def _close(self, request: SimRequest) -> None:
        """Nothing more becomes of it."""
        self._open -= 1
        request.attempt = None
        self.columns.add(request)

    def placed(self, request: SimRequest, route: Route, ticket: DispatchTicket) -> None:
        """As of `RouterEnds`."""
        sink = self.workers[route.decode.worker_id]
        source = None if route.prefill is None else self.workers[route.prefill.worker_id]
        attempt = Attempt(request, route, ticket, sink, source, None)  # type: ignore[arg-type]
        attempt.at_sink = self._held(attempt, request, is_for_other=False)
        if source is not None:
            attempt.at_source = self._held(attempt, request, is_for_other=True)
        request.attempt = attempt
        request.attempts += 1
        self._quiet -= route.workers
        request.decode_worker = route.decode.worker_id
        request.prefill_worker = route.computing.worker_id
        take = sink.compute if source is None else sink.await_kv
        self.queue.after(self._times.hop_s, take, attempt.at_sink)

    def _held(self, attempt: Attempt, request: SimRequest, *, is_for_other: bool) -> HeldRequest:
        self._arrivals += 1
        page = self._settings.page_size
        longest = request.asked.prompt_tokens + request.asked.answer_tokens - 1
        share = math.ceil(self._settings.output_reserve * request.answer_left)
        promised = request.known if is_for_other else min(longest, request.known + share)
        return HeldRequest(
            attempt=attempt,
            arrival=self._arrivals,
            ids=request.asked.ids,
            known=request.known,
            longest=request.known if is_for_other else longest,
            promise=-(-promised // page),
            is_for_other=is_for_other,
        )

    # --- the handoff ----------------------------------------------------------------------------

    def expects(self, request: HeldRequest) -> None:
        """As of `WorkerEnds`."""
        attempt = request.attempt
        assert attempt.source is not None, "nobody else computes it"
        self.queue.after(self._times.hop_s, attempt.source.compute, attempt.at_source)

    def prompt_begun(self, request: HeldRequest) -> None:
        """As of `WorkerEnds`."""
        attempt = request.attempt
        attempt.computed_to = request.hit
        attempt.request.cached_tokens = request.hit
        self.queue.after(self._times.hop_s, attempt.sink.reserve, attempt.at_sink)

    def reserved(self, request: HeldRequest) -> None:
        """As of `WorkerEnds`."""
        attempt = request.attempt
        attempt.is_reserved = True
        attempt.sent_to = request.hit
        attempt.sent_at = self.queue.time
        self._send(attempt, self.queue.time)

    def chunk_computed(self, request: HeldRequest, start: int, began_at: float) -> None:
        """As of `WorkerEnds`."""
        del start
        attempt = request.attempt
        attempt.computed_to = request.computed
        if attempt.is_reserved:
            self._send(attempt, began_at)

    def _send(self, attempt: Attempt, since: float) -> None:
        """What is computed and not sent leaves, layer by layer, from `since` on."""
        tokens = attempt.computed_to - attempt.sent_to
        source, sink = attempt.source, attempt.sink
        assert source is not None, "there is nothing to send"
        if tokens > 0:
            seconds = self._times.transfer_bytes_s(tokens)
            begins = max(since, source.link_free_at, sink.link_free_at)
            ends = max(begins + seconds, self.queue.time + seconds / self._times.layers)
            source.link_free_at = sink.link_free_at = ends
            sink.link_rate = self._times.bytes_per_s
            attempt.sent_at = max(attempt.sent_at, ends)
            attempt.sent_to = attempt.computed_to
            attempt.moved += tokens
        if attempt.at_source is not None and attempt.computed_to == attempt.at_source.known:
            self.queue.at(attempt.sent_at + self._times.transfer_s, self._moved, attempt)

    def _moved(self, attempt: Attempt) -> None:
        if attempt.is_over:
            return
        attempt.request.moved_tokens = attempt.moved
        attempt.sink.take_in(attempt.at_sink)
        if attempt.source is not None and attempt.at_source is not None:
            attempt.source.let_go(attempt.at_source)

    def prompt_computed(self, request: HeldRequest) -> None:
        """As of `WorkerEnds`."""
        attempt = request.attempt
        if not request.is_for_other and not request.was_retracted:
            attempt.request.cached_tokens = request.hit
        # From the prefill worker by way of the decode worker.
        hops = 2 if request.is_for_other else 1
        self.queue.after(hops * self._times.hop_s, self._first_token, attempt, request)

    def _first_token(self, attempt: Attempt, held: HeldRequest) -> None:
        request = attempt.request
        if attempt.is_over or held.was_retracted:
            return
        if request.first_token_s is None:
            request.first_token_s = self.queue.time
        request.known += 1
        computed = max(1, held.known - held.hit)
        self.routers[request.router].prefilled(request, attempt.ticket, computed)

    def answered(self, request: HeldRequest) -> None:
        """As of `WorkerEnds`."""
        self.queue.after(self._times.hop_s, self._ended, request.attempt)

    def _ended(self, attempt: Attempt) -> None:
        if attempt.is_over:
            return
        attempt.is_over = True
        request = attempt.request
        if request.first_token_s is None:
            # All of a short answer comes in one message.
            request.first_token_s = self.queue.time
        request.outcome, request.end_s = "done", self.queue.time
        more = request.answer_left
        request.known += more
        self._close(request)
        router = self.routers[request.router]
        router.attempt_ended(attempt.ticket)
        router.end(request, more)

    # --- what routers are told ------------------------------------------------------------------

    def cache_changed(self, worker: SimWorker, events: list[KvEvent]) -> None:
        """As of `WorkerEnds`."""
        info = worker.info
        sequence = self._sequences[info.worker_id] = self._sequences[info.worker_id] + 1
        batch = KvEventBatch(info.worker_id, info.incarnation, sequence, False, tuple(events))
        self.counts.kv_batches += 1
        for router in self.routers:
            router.hear(batch, self.queue.time + self._settings.event_delay_s)

    def lost_track(self, router: SimRouter, worker_id: WorkerId) -> None:
        """As of `RouterEnds`."""
        self._send_snapshot(router, self.workers[worker_id], self._settings.event_delay_s)

    def _send_snapshot(self, router: SimRouter, worker: SimWorker, delay_s: float) -> None:
        info, held = worker.info, BlocksStored(worker.kv.cache.snapshot_blocks())
        sequence = self._sequences[info.worker_id]
        batch = KvEventBatch(info.worker_id, info.incarnation, sequence, True, (held,))
        self.counts.snapshots += 1
        router.hear(batch, self.queue.time + delay_s)

    def _report(self, part: int) -> None:
        quiet = self._quiet
        for worker in tuple(self.workers.values())[part::_SWEEPS]:
            name = worker.info.worker_id
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

    def _worker(self, info: WorkerInfo) -> SimWorker:
        settings = self._settings
        pages = settings.kv_tokens // settings.page_size
        cache = page_cache(pages, settings.rows, self._context_pages, settings.eviction)
        return SimWorker(info, cache, settings.places, self._times, self.queue, self)


def _infos(settings: SimSettings) -> Iterator[WorkerInfo]:
    roles = [Role.PREFILL] * settings.prefill + [Role.DECODE] * settings.decode
    roles += [Role.BOTH] * settings.both
    for number, role in enumerate(roles):
        name = WorkerId(f"{role.value}-{number}")
        yield WorkerInfo(name, role, Incarnation(1), "")
