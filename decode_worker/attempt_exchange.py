"""All attempts that one router has in this worker, on one stream of messages each way.

Everything here runs on the event loop. Commands become events of the engine thread; what this
says comes back through an `Outbox`, a turn of the engine at a time, and leaves in one message.

A router that does not read holds up the writing. What waits for it is bounded, by count
(`BACKLOG_MAX`) and by time (`WRITE_TIMEOUT_S`): beyond either its stream is given up, and its
attempts are cancelled at once, so that no KV is kept for nobody.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Any

import grpc.aio

from decode_worker.intake import CancelAttempt, EndSample, StartAttempt
from kvferry.convert import attempt_output_to_wire, attempt_request_from_wire
from kvferry.duplex import run_until_one_ends
from kvferry.error_wire import attempt_error_to_wire
from kvferry.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidInput,
    KvferryError,
    WorkerUnavailable,
)
from kvferry.limits import WRITER_CHECK_INTERVAL_S
from kvferry.rpc.v1 import worker_pb2 as worker

if TYPE_CHECKING:
    from engine.step_loop import StepLoop
    from kvferry.duplex import MessageStream
    from kvferry.generation import AttemptOutput
    from kvferry.ids import AttemptId
    from kvferry.membership import WorkerInfo

_log = logging.getLogger(__name__)

BACKLOG_MAX = 2**18
"""Entries that wait for one router: a token, an alternative of one, an end. At about 150 bytes
each they are 40 MB. 64 sequences of 100 tokens a second come to that in 40 s."""

WRITE_TIMEOUT_S = 30.0
"""A router that takes nothing for so long has stopped; those it serves have given up."""

_MESSAGE_ENTRIES_MAX = 8192
"""Of one message; at 30 bytes an entry 240 KiB."""


class AttemptExchange:
    """The worker's end, for one router.

    An attempt is in `_attempts` from its start until its end was queued, or its router has
    cancelled it. Nothing is sent of others.
    """

    def __init__(self, info: WorkerInfo, step_loop: StepLoop) -> None:
        self._info = info
        self._step_loop = step_loop
        self._attempts: dict[int, _Attempt] = {}
        self._outgoing: deque[tuple[int, AttemptOutput | KvferryError | None]] = deque()
        """By the attempt's number; None is the end of one that has succeeded."""
        self._backlog = 0
        """Entries that have not left, those of the message that is being written included."""
        self._has_outgoing = asyncio.Event()
        self._has_overflowed = asyncio.Event()

    @property
    def backlog(self) -> int:
        """Entries that have not left."""
        return self._backlog

    async def run(self, stream: MessageStream) -> None:
        """Converse until the router ends it. Raises `KvferryError` where this side has to."""
        try:
            await run_until_one_ends(self._read_all(stream), self._write_all(stream), self._watch())
        finally:
            self._cancel_all()

    # --- what attempts say ---------------------------------------------------------------------

    def deliver(self, attempt: _Attempt, item: AttemptOutput | KvferryError) -> None:
        """Queue what an attempt says; of one that has ended here it is of no interest."""
        if self._attempts.get(attempt.number) is not attempt:
            return
        self._queue(attempt.number, item)
        if isinstance(item, KvferryError):
            self._forget(attempt)
        else:
            attempt.samples_left -= item.finish is not None
            if attempt.samples_left == 0:
                self._queue(attempt.number, None)
                self._forget(attempt)
        if self._backlog > BACKLOG_MAX:
            self._has_overflowed.set()
            self._cancel_all()

    def _queue(self, number: int, item: AttemptOutput | KvferryError | None) -> None:
        self._outgoing.append((number, item))
        self._backlog += _entries_of(item)
        self._has_outgoing.set()

    async def _write_all(self, stream: MessageStream) -> None:
        while True:
            await self._has_outgoing.wait()
            self._has_outgoing.clear()
            while self._outgoing:
                message, entries = self._next_message()
                try:
                    async with asyncio.timeout(WRITE_TIMEOUT_S):
                        await stream.write(message)
                except TimeoutError:
                    problem = f"the router has not read for {WRITE_TIMEOUT_S:g} s"
                    raise WorkerUnavailable(problem) from None
                self._backlog -= entries

    def _next_message(self) -> tuple[worker.AttemptEvents, int]:
        """What waits longest, and how many entries it is."""
        events = worker.AttemptEvents()
        entries = 0
        columns: list[tuple[int, int, int]] = []
        told: set[int] = set()
        while self._outgoing and entries < _MESSAGE_ENTRIES_MAX:
            number, item = self._outgoing.popleft()
            entries += _entries_of(item)
            if item is None:
                events.ended.append(number)
            elif isinstance(item, KvferryError):
                events.errors.append(attempt_error_to_wire(number, item))
            elif _is_plain(item) and number not in told:
                columns += [(number, item.sample, token.token_id) for token in item.tokens]
            else:
                # What follows of this attempt must not overtake it in the columns.
                told.add(number)
                events.outputs.append(attempt_output_to_wire(item, number))
        if columns:
            numbers, samples, ids = zip(*columns, strict=True)
            events.token_numbers.extend(numbers)
            events.token_samples.extend(samples)
            events.token_ids.extend(ids)
        return events, entries

    async def _watch(self) -> None:
        """Raise when the router has not read too much, or nobody writes any more."""
        while True:
            try:
                await asyncio.wait_for(self._has_overflowed.wait(), WRITER_CHECK_INTERVAL_S)
            except TimeoutError:
                if self._step_loop.is_alive() or self._backlog:
                    continue
                raise WorkerUnavailable("the engine has stopped") from None
            raise WorkerUnavailable(f"the router has left {BACKLOG_MAX} tokens unread")

    # --- what the router says ------------------------------------------------------------------

    async def _read_all(self, stream: MessageStream) -> None:
        while (message := await stream.read()) is not grpc.aio.EOF:
            for command in message.commands:
                self._obey(command)

    def _obey(self, command: Any) -> None:
        number = command.number
        match command.WhichOneof("command"):
            case "start":
                self._start(number, command.start)
            case "cancel":
                if number in self._attempts:
                    self._cancel(self._attempts[number])
            case "end_sample":
                attempt = self._attempts.get(number)
                if attempt is not None and attempt.id is not None:
                    self._step_loop.post(EndSample(attempt.id, command.end_sample.sample))
            case kind:
                raise InvalidInput("commands", f"{kind!r} is not known")

    def _start(self, number: int, start: worker.StartAttempt) -> None:
        if number in self._attempts:
            raise InvalidInput("number", f"{number} is that of another attempt")
        attempt = _Attempt(self, number)
        self._attempts[number] = attempt
        try:
            self._accept(attempt, start)
        except KvferryError as error:
            attempt.deliver(error)
        except Exception:  # noqa: BLE001 - the outermost frame of this attempt; ends it alone
            _log.exception("an attempt failed for a fault of ours")
            attempt.deliver(InternalError("a fault of the server; its log has the details"))

    def _accept(self, attempt: _Attempt, start: worker.StartAttempt) -> None:
        incarnation = start.attempt.incarnation
        if incarnation != self._info.incarnation:
            raise WorkerUnavailable(f"incarnation {incarnation} of {self._info.worker_id} is gone")
        request = attempt_request_from_wire(start.attempt)
        attempt.id = request.id
        attempt.samples_left = request.samples_left
        loop = asyncio.get_running_loop()
        attempt.timer = loop.call_later(start.timeout_s, self._expire, attempt)
        self._step_loop.post(StartAttempt(request, attempt, self._step_loop.now()))

    # --- ends ----------------------------------------------------------------------------------

    def _expire(self, attempt: _Attempt) -> None:
        """Its router was to end it, and has not: it may be gone without a word."""
        self._post_cancel(attempt)
        attempt.deliver(DeadlineExceeded("the attempt was not done in its time"))

    def _cancel(self, attempt: _Attempt) -> None:
        self._forget(attempt)
        self._post_cancel(attempt)

    def _cancel_all(self) -> None:
        for attempt in tuple(self._attempts.values()):
            self._cancel(attempt)
        self._outgoing.clear()

    def _post_cancel(self, attempt: _Attempt) -> None:
        if attempt.id is not None:
            self._step_loop.post(CancelAttempt(attempt.id, attempt))

    def _forget(self, attempt: _Attempt) -> None:
        del self._attempts[attempt.number]
        if attempt.timer is not None:
            attempt.timer.cancel()


class _Attempt:
    """An `AttemptStream` whose outputs go to one router."""

    __slots__ = ("_exchange", "id", "number", "samples_left", "timer")

    def __init__(self, exchange: AttemptExchange, number: int) -> None:
        self._exchange = exchange
        self.number = number
        self.id: AttemptId | None = None
        """None for one that the engine has not heard of."""
        self.samples_left = 0
        self.timer: asyncio.TimerHandle | None = None

    def deliver(self, item: AttemptOutput | KvferryError) -> None:
        """See `AttemptStream`."""
        self._exchange.deliver(self, item)


def _is_plain(output: AttemptOutput) -> bool:
    """Whether it is tokens and nothing else."""
    tokens, finish, usage, _, marks = output
    is_more = finish is not None or usage is not None or marks is not None
    return bool(tokens) and not is_more and tokens[0].logprobs is None


def _entries_of(item: AttemptOutput | KvferryError | None) -> int:
    """What it counts for: its tokens with their alternatives, at least 1."""
    if item is None or isinstance(item, KvferryError) or not item.tokens:
        return 1
    logprobs = item.tokens[0].logprobs
    return len(item.tokens) * (1 if logprobs is None else 1 + len(logprobs.top))
