"""A simulated worker: steps over prompts and answers, as `engine.scheduler` plans them.

A step decodes every answer and spends what is left of `chunk_tokens` on prompts, in order of
arrival. Steps without prompts are all alike until an answer ends, joins, or lacks a page: they are
a *run*, of which only the end is an event. What comes meanwhile ends it behind the step that is
under way.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, NamedTuple

from kvferry.accounts import WorkerLoad
from simulator.answers import Answers
from simulator.worker_ends import WorkerCounts
from simulator.worker_kv import WorkerKv

if TYPE_CHECKING:
    from kvferry.membership import WorkerInfo
    from mem_cache.kv_cache import KVCache
    from simulator.event_queue import EventQueue
    from simulator.held_request import HeldRequest
    from simulator.host import Host
    from simulator.settings import Places
    from simulator.worker_ends import WorkerEnds, WorkerNews

_RATE_MEMORY = 0.9
"""As of `engine.engine`."""


class _Chunk(NamedTuple):
    request: HeldRequest
    start: int
    stop: int


class SimWorker:
    """One worker; `ends` are told what it did, at the time when it did it."""

    def __init__(
        self,
        info: WorkerInfo,
        cache: KVCache,
        places: Places,
        host: Host,
        queue: EventQueue,
        ends: WorkerEnds,
        news: WorkerNews,
    ) -> None:
        self.info = info
        self.kv = WorkerKv(cache, places.page_tokens)
        self.rate = 0.0
        """Prompt tokens per second, in the mean of late; 0 before the first step."""
        self.link_rate = 0.0
        self.link_free_at = 0.0
        """When what it sends or receives has gone through."""
        self.counts = WorkerCounts()
        self.is_dead = False
        self._places = places
        self._host = host
        self._times = host.times(self)
        """Of the step that is under way, or the run."""
        self._queue = queue
        self._ends = ends
        self._news = news
        self._waiting: list[HeldRequest] = []
        self._deferred: list[HeldRequest] = []
        self._expected: dict[HeldRequest, int] = {}
        """With the pages that are kept for each."""
        self._unreserved: list[HeldRequest] = []
        """Whose prompt another worker computes already, and for which there was no room."""
        self._inbound: dict[HeldRequest, None] = {}
        self._parked: dict[HeldRequest, None] = {}
        """Prompts for other workers, until their KV is read."""
        self._prefilling: list[HeldRequest] = []
        self._decoding = Answers(places.page_tokens)
        self._chunks: list[_Chunk] = []
        self._began_at = 0.0
        """The step that is under way, or the run."""
        self._run = 0
        """Steps of the run; 0: the step has prompts, or there is none."""
        self._is_busy = False
        self._taking_part = 0
        """Answers in the step that is under way."""
        self._wake = 0
        """Number of the call that counts."""
        self._changes = 0
        self._refused: tuple[HeldRequest, int] | None = None

    # --- what comes -----------------------------------------------------------------------------

    def compute(self, request: HeldRequest) -> None:
        """Accept a prompt."""
        self._cut_run()
        bisect.insort(self._waiting, request, key=_arrival)
        self._news.accepted(self, request)
        self._go_on()

    def await_kv(self, request: HeldRequest) -> None:
        """Accept a request whose prompt another worker is to compute."""
        request.is_inbound = True
        self._deferred.append(request)
        self._expect_more()

    def reserve(self, request: HeldRequest) -> None:
        """The other worker has begun: take the pages for what it will send."""
        if not self._try_reserve(request):
            self._unreserved.append(request)

    def take_in(self, request: HeldRequest) -> None:
        """All of the prompt's KV is here: decode from the next step on."""
        self._cut_run()
        del self._inbound[request]
        request.is_inbound = False
        self.kv.adopt(request)
        self._start_decoding(request)
        self._go_on()

    def let_go(self, request: HeldRequest) -> None:
        """The KV of a prompt for another worker has been read."""
        del self._parked[request]
        self.kv.release(request, request.computed)
        self._changed()
        self._go_on()

    def abort(self, request: HeldRequest) -> None:
        """Whoever asked for it wants no more of it; nothing if it has ended."""
        self._cut_run()
        for stage in (self._waiting, self._deferred, self._unreserved, self._prefilling):
            if request in stage:
                stage.remove(request)
        for kept in (self._expected, self._inbound, self._parked):
            kept.pop(request, None)
        if request in self._decoding:
            self._decoding.leave(request)
        if request.kv is not None:
            self.kv.release(request, 0 if request.is_inbound else request.computed)
        self._chunks = [chunk for chunk in self._chunks if chunk.request is not request]
        self._changed()
        self._go_on()

    # --- what is told ---------------------------------------------------------------------------

    def load(self) -> WorkerLoad:
        """As its status says now."""
        if self._run > 1 and self._decoding.lacks_page_within(self._run):
            # Otherwise nothing that is asked for changes before the run ends.
            self._settle_run()
        prompts = 0
        for stage in (self._prefilling, self._waiting, self._deferred):
            for request in stage:
                prompts += request.known - request.computed
        return WorkerLoad(
            running=len(self._decoding) + len(self._prefilling),
            waiting=len(self._waiting) + len(self._deferred),
            waiting_tokens=prompts,
            handoffs=len(self._inbound) + len(self._parked),
            prefill_tokens_per_s=self.rate,
            link_bytes_per_s=self.link_rate,
        )

    @property
    def is_idle(self) -> bool:
        """Whether it has no request at all."""
        return not (self._is_busy or self._parked or self._inbound or self._expected) and not (
            self._waiting or self._deferred or self._prefilling or self._unreserved
        )

    def tokens_told(self, request: HeldRequest) -> int:
        """Of prompt and answer, those that whoever asked has from here; 0 before it decodes."""
        self._settle_run()
        if request not in self._decoding:
            return 0
        return self._decoding.told(request)

    @property
    def requests(self) -> int:
        """That it has in any stage."""
        waiting = len(self._waiting) + len(self._deferred) + len(self._expected)
        handed = len(self._unreserved) + len(self._inbound) + len(self._parked)
        return waiting + handed + len(self._prefilling) + len(self._decoding)

    @property
    def decoding(self) -> int:
        """Answers under way."""
        return len(self._decoding)

    # --- the step -------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """There is something new, which may make a step possible."""
        self._tell_cache()
        if not self._is_busy:
            self._begin()

    def neighbours_changed(self) -> None:
        """As of `Hosted`."""
        self._cut_run()

    def die(self) -> None:
        """Whatever was under way never ends."""
        self.is_dead = True
        self._host.note(self, is_busy=False)

    def _cut_run(self) -> None:
        """Have a run end behind the step that is under way, before its answers change."""
        self._settle_run()
        if self._run > 1:
            self._run = 1
            self._wake_after(self._times.decode_s(len(self._decoding), self._decoding.context))

    def _wake_after(self, seconds: float) -> None:
        self._wake += 1
        self._queue.at(self._began_at + seconds, self._woken, self._wake)

    def _woken(self, number: int) -> None:
        if number != self._wake or self.is_dead:
            return
        seconds = self._queue.time - self._began_at
        self.counts.busy_s += seconds
        chunks, self._chunks = self._chunks, []
        steps, self._run, self._is_busy = self._run, 0, False
        if steps:
            self._count_decodes(steps, seconds)
            self._advance(steps)
        elif self._taking_part:
            self._advance(1)
        self._end_chunks(chunks, seconds)
        self._tell_cache()
        self._begin()

    def _begin(self) -> None:
        """The next step, if there is something to do."""
        self._reserve_more()
        self._expect_more()
        self._admit()
        self._grow(self._decoding.steps + 1)
        self._chunks = self._next_chunks()
        self._began_at = self._queue.time
        self._times = self._host.times(self)
        sequences = self._taking_part = len(self._decoding)
        if self._chunks:
            self._is_busy, self._run = True, 0
            tokens = sum(chunk.stop - chunk.start for chunk in self._chunks)
            contexts = sum(_contexts(chunk) for chunk in self._chunks)
            seconds = self._times.prompts_s(tokens, contexts)
            if sequences:
                seconds += self._times.decode_s(sequences, self._decoding.context)
            self._wake_after(seconds)
        elif sequences:
            self._is_busy, self._run = True, self._run_length()
            self._wake_after(self._times.decodes_s(self._run, sequences, self._decoding.context))
        self._host.note(self, is_busy=self._is_busy)
        self._tell_cache()

    def _run_length(self) -> int:
        """Steps until an answer ends, or might lack a page."""
        steps = self._decoding.steps_to_end()
        needed = len(self._decoding) * (steps // self._places.page_tokens + 1)
        return steps if self.kv.spare >= needed else self._decoding.steps_to_page(steps)

    def _settle_run(self) -> None:
        """Count the steps of a run that have ended by now."""
        if self._run < 2:
            return
        sequences, context = len(self._decoding), self._decoding.context
        passed = self._queue.time - self._began_at
        steps = min(self._times.steps_within(passed, sequences, context), self._run - 1)
        if steps:
            seconds = self._times.decodes_s(steps, sequences, context)
            self.counts.busy_s += seconds
            self._began_at += seconds
            self._run -= steps
            self._count_decodes(steps, seconds)
            self._advance(steps)
            self._tell_cache()

    def _count_decodes(self, steps: int, seconds: float) -> None:
        self.counts.decode_steps += steps
        self.counts.decode_tokens += steps * self._taking_part
        self.counts.decode_s += seconds

    def _advance(self, steps: int) -> None:
        """The answers are so many tokens longer; those that are complete end."""
        self._decoding.passed(steps)
        self._grow(self._decoding.steps)
        while (request := self._decoding.pop_ended()) is not None:
            self._decoding.leave(request)
            self._end_answer(request)

    def _end_answer(self, request: HeldRequest) -> None:
        self.kv.release(request, request.longest)
        self._changed()
        self._ends.answered(request)

    def _end_chunks(self, chunks: list[_Chunk], seconds: float) -> None:
        tokens = sum(chunk.stop - chunk.start for chunk in chunks)
        if tokens:
            rate = tokens / seconds
            old = self.rate
            self.rate = rate if old == 0.0 else _RATE_MEMORY * old + (1 - _RATE_MEMORY) * rate
        for request, _, stop in chunks:
            self.kv.computed(request, stop)
            if request.is_for_other:
                self._ends.chunk_computed(request, self._began_at)
            if request.uncomputed == 0:
                self._prefilling.remove(request)
                if request.is_for_other:
                    self._parked[request] = None
                # Told first: an answer of one token ends where it would begin to decode.
                self._ends.prompt_computed(request)
                if not request.is_for_other:
                    self._start_decoding(request)

    # --- who takes part -------------------------------------------------------------------------

    def _admit(self) -> None:
        """Admit waiting prompts while the step has tokens left for them."""
        while self._waiting:
            request = self._waiting[0]
            budget = self._budget - sum(other.uncomputed for other in self._prefilling)
            if budget <= 0 or self._refused == (request, self._changes):
                return
            if self._occupied >= self._places.running_max or self._comes_after_deferred(request):
                return
            if not self.kv.try_open(request, self._kept_before(request)):
                self._refused = (request, self._changes)
                return
            del self._waiting[0]
            self._prefilling.append(request)
            self._changed()
            if request.is_for_other:
                self._ends.prompt_begun(request)

    def _next_chunks(self) -> list[_Chunk]:
        budget, chunks = self._budget, []
        # A copy: who is retracted for room leaves the list.
        for request in tuple(self._prefilling):
            if budget == 0:
                break
            stop = request.computed + min(budget, request.uncomputed)
            if request.kv is None:
                continue
            needed = self.kv.pages_of(stop) - request.kv.allocated_len
            if self._make_room(request, needed):
                self.kv.grow(request, stop)
                chunks.append(_Chunk(request, request.computed, stop))
                budget -= stop - request.computed
        return [chunk for chunk in chunks if chunk.request.kv is not None]

    @property
    def _budget(self) -> int:
        return max(self._places.chunk_tokens - len(self._decoding), 1)

    @property
    def _occupied(self) -> int:
        return len(self._decoding) + len(self._prefilling) + len(self._inbound)

    def _comes_after_deferred(self, request: HeldRequest) -> bool:
        is_younger = bool(self._deferred) and self._deferred[0].arrival < request.arrival
        return is_younger and not self._has_retracted()

    def _has_retracted(self) -> bool:
        return any(request.was_retracted for request in self._waiting)

    def _kept_before(self, request: HeldRequest) -> int:
        return sum(
            kept for other, kept in self._expected.items() if other.arrival < request.arrival
        )

    def _yields(self, inbound: HeldRequest) -> bool:
        """Whether somebody who waits for room goes before what comes from another worker."""
        oldest = self._waiting[0] if self._waiting else None
        is_older = oldest is not None and oldest.arrival < inbound.arrival
        if is_older and self._refused is not None and self._refused[0] is oldest:
            return True
        return self._has_retracted()

    def _expect_more(self) -> None:
        """Have those computed elsewhere that are expected to fit, oldest first."""
        while self._deferred:
            request = self._deferred[0]
            if self._occupied + len(self._expected) >= self._places.running_max:
                return
            kept = sum(self._expected.values())
            if self._yields(request) or kept + request.promise > self.kv.slack:
                return
            if len(self._expected) >= self.kv.cache.rows.num_free:
                return
            del self._deferred[0]
            self._expected[request] = request.promise
            self._ends.expects(request)

    def _try_reserve(self, request: HeldRequest) -> bool:
        if self._occupied >= self._places.running_max or self._yields(request):
            return False
        self._cut_run()
        if not self.kv.try_open(request, self._kept_before(request)):
            return False
        del self._expected[request]
        self._inbound[request] = None
        self.kv.grow(request, request.known)
        self._ends.reserved(request)
        self._tell_cache()
        return True

    def _reserve_more(self) -> None:
        while self._unreserved and self._try_reserve(self._unreserved[0]):
            del self._unreserved[0]

    def _start_decoding(self, request: HeldRequest) -> None:
        self._changed()
        if request.longest <= request.known:
            self._end_answer(request)
        else:
            self._decoding.join(request, is_late=self._is_busy)

    # --- pages ----------------------------------------------------------------------------------

    def _grow(self, step: int) -> None:
        """Have the pages that the answers need up to this step."""
        while (request := self._decoding.pop_page(step)) is not None:
            if self._make_room(request, 1):
                self.kv.grow(request, request.known + request.page_due - request.joined)
                self._decoding.want_page(request)
            elif request in self._decoding:
                self.counts.steps_sat_out += 1
                self._decoding.sit_out(request)

    def _make_room(self, request: HeldRequest, pages: int) -> bool:
        """Whether a request of the next step may take so many pages; others are retracted for it,
        or itself."""
        if request.is_for_other:
            return pages <= self.kv.available
        while pages > self.kv.spare:
            victim = self._victim()
            if victim is None:
                return False
            self._retract(victim)
            if victim is request:
                return False
        return True

    def _victim(self) -> HeldRequest | None:
        """The youngest that may lose its KV. Never the oldest, nor an assured one."""
        running = (*self._decoding, *(r for r in self._prefilling if not r.is_for_other))
        if len(running) < 2:
            return None
        youngest = max(running, key=_arrival)
        return None if youngest.arrival <= self.kv.horizon else youngest

    def _retract(self, request: HeldRequest) -> None:
        computed = request.computed
        if request in self._decoding:
            self._decoding.leave(request)
            computed = request.computed
            request.known = computed + 1
        else:
            self._prefilling.remove(request)
        self.kv.release(request, computed)
        request.computed, request.was_retracted = 0, True
        bisect.insort(self._waiting, request, key=_arrival)
        self.counts.retractions += 1
        self._changed()

    def _changed(self) -> None:
        self._changes += 1

    def _tell_cache(self) -> None:
        events = self.kv.cache.take_events()
        if events:
            self._news.changed(self, events)


def _contexts(chunk: _Chunk) -> float:
    tokens = chunk.stop - chunk.start
    return tokens * (chunk.start + (tokens - 1) / 2)


def _arrival(request: HeldRequest) -> int:
    return request.arrival
