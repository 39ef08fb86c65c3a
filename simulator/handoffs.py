"""What goes between two workers for an attempt, as `kv_transfer` has it go: messages and KV.

    decode worker has room   --hop-->  prefill worker queues the prompt
    its first chunk begins   --hop-->  decode worker takes pages, for what it does not hold itself
    each chunk is computed             leaves layer by layer: the last one's tail is what is waited
                                       for, or the link, where that is slower
    the last is there                  the decode worker adopts it, the prefill worker lets go

A link is what a worker can send or take in: transfers of one worker go one after the other. The
protocol's cores do not run here; their messages are what costs time, and what they guard against
does not happen in one thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulator.attempt import Attempt
    from simulator.event_queue import EventQueue
    from simulator.held_request import HeldRequest
    from simulator.step_times import StepTimes
    from simulator.worker import SimWorker


class AttemptEnds(Protocol):
    """Who is told what became of attempts."""

    def first_token(self, attempt: Attempt, held: HeldRequest) -> None:
        """The first token that the attempt gives."""
        ...

    def ended(self, attempt: Attempt) -> None:
        """Its answer is complete."""
        ...


class Handoffs:
    """All attempts under way. What is told of one that is over, or by who is dead, is lost."""

    def __init__(self, times: StepTimes, queue: EventQueue, ends: AttemptEnds) -> None:
        self._times = times
        self._queue = queue
        self._ends = ends

    def begin(self, attempt: Attempt) -> None:
        """The router asks the decode worker."""
        sink = attempt.sink
        take = sink.compute if attempt.source is None else sink.await_kv
        self._send(attempt, sink, take, attempt.at_sink)

    def expects(self, request: HeldRequest) -> None:
        """As of `WorkerEnds`."""
        attempt = request.attempt
        source, held = attempt.prefill_side
        self._send(attempt, source, source.compute, held)

    def prompt_begun(self, request: HeldRequest) -> None:
        """As of `WorkerEnds`."""
        attempt = request.attempt
        attempt.computed_to = request.hit
        attempt.request.cached_tokens = request.hit
        self._send(attempt, attempt.sink, attempt.sink.reserve, attempt.at_sink)

    def reserved(self, request: HeldRequest) -> None:
        """As of `WorkerEnds`."""
        attempt = request.attempt
        attempt.is_reserved = True
        attempt.sent_to, attempt.sent_at = request.hit, self._queue.time
        self._ferry(attempt, self._queue.time)

    def chunk_computed(self, request: HeldRequest, began_at: float) -> None:
        """As of `WorkerEnds`."""
        attempt = request.attempt
        attempt.computed_to = request.computed
        if attempt.is_reserved:
            self._ferry(attempt, began_at)

    def prompt_computed(self, request: HeldRequest) -> None:
        """As of `WorkerEnds`."""
        attempt = request.attempt
        if request.was_retracted:
            return
        if not request.is_for_other:
            attempt.request.cached_tokens = request.hit
        # From the prefill worker by way of the decode worker.
        hops = 2 if request.is_for_other else 1
        self._queue.after(hops * self._times.hop_s, self._ends.first_token, attempt, request)

    def answered(self, request: HeldRequest) -> None:
        """As of `WorkerEnds`."""
        self._queue.after(self._times.hop_s, self._ends.ended, request.attempt)

    def _send(
        self,
        attempt: Attempt,
        to: SimWorker,
        call: Callable[[HeldRequest], None],
        held: HeldRequest,
    ) -> None:
        self._queue.after(self._times.hop_s, self._deliver, attempt, to, call, held)

    def _deliver(
        self,
        attempt: Attempt,
        to: SimWorker,
        call: Callable[[HeldRequest], None],
        held: HeldRequest,
    ) -> None:
        if not (attempt.is_over or to.is_dead):
            call(held)

    def _ferry(self, attempt: Attempt, since: float) -> None:
        """What is computed and not sent leaves, layer by layer, from `since` on."""
        (source, held), sink, times = attempt.prefill_side, attempt.sink, self._times
        tokens = attempt.computed_to - attempt.sent_to
        if tokens > 0:
            seconds = times.transfer_bytes_s(tokens)
            begins = max(since, source.link_free_at, sink.link_free_at)
            ends = max(begins + seconds, self._queue.time + seconds / times.layers)
            source.link_free_at = sink.link_free_at = ends
            sink.link_rate = times.bytes_per_s
            attempt.sent_at = max(attempt.sent_at, ends)
            attempt.sent_to = attempt.computed_to
            attempt.moved += tokens
        if attempt.computed_to == held.known:
            self._queue.at(attempt.sent_at + times.transfer_s, self._moved, attempt)

    def _moved(self, attempt: Attempt) -> None:
        source, held = attempt.prefill_side
        if attempt.is_over or source.is_dead or attempt.sink.is_dead:
            return
        attempt.request.moved_tokens = attempt.moved
        attempt.is_moved = True
        attempt.sink.take_in(attempt.at_sink)
        source.let_go(held)
