"""All attempts that this router has at one worker, on one stream of messages each way.

Everything here runs on the router's event loop. Commands that are given while a message is being
written leave together in the next one. What comes is sorted to its attempts at once, whether they
are read or not, so that no slow client holds up another one; what waits for one attempt's reader
is at most the answer it asked for.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING

import grpc.aio

from kvferry import convert
from kvferry.duplex import run_until_one_ends
from kvferry.error_wire import error_from_wire
from kvferry.errors import DeadlineExceeded, KvferryError, WorkerUnavailable
from kvferry.generation import AttemptOutput, OutputToken
from kvferry.rpc.v1 import worker_pb2
from router.worker_errors import connection_closed, errors_of

if TYPE_CHECKING:
    from typing import Any

    from kvferry.attempt_marks import AttemptMarks
    from kvferry.generation import AttemptFinish, AttemptRequest, AttemptUsage
    from kvferry.membership import WorkerInfo

_log = logging.getLogger(__name__)

_MESSAGE_PROMPT_TOKENS_MAX = 2**20
"""Prompts of more tokens together leave in several messages; a single one may be longer."""


class AttemptExchange:
    """The router's end of one stream. Once it has ended, another one takes its place.

    An attempt is in `_attempts` from its start until its end, which it gets exactly once: the
    worker's word, an abort, its deadline, or the end of the stream.
    """

    def __init__(self, call: Any, info: WorkerInfo) -> None:
        """`call` is a bidirectional gRPC call that nobody else uses."""
        self.has_ended = False
        """Whether no attempt can be started here any more."""
        self._call = call
        self._info = info
        self._attempts: dict[int, ExchangedAttempt] = {}
        self._numbers = 0
        self._outgoing: deque[tuple[ExchangedAttempt, worker_pb2.AttemptCommand]] = deque()
        self._has_outgoing = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def start(self, request: AttemptRequest, timeout_s: float) -> ExchangedAttempt:
        """Send an attempt; without an end from elsewhere it ends after `timeout_s`."""
        assert not self.has_ended, "a stream that has ended starts nothing"
        self._numbers += 1
        attempt = ExchangedAttempt(self, self._numbers)
        message = convert.attempt_request_to_wire(request, self._info.incarnation)
        start = worker_pb2.StartAttempt(attempt=message, timeout_s=timeout_s)
        self._attempts[attempt.number] = attempt
        self.send(attempt, worker_pb2.AttemptCommand(number=attempt.number, start=start))
        expired = DeadlineExceeded(
            f"worker {self._info.worker_id} was not done within {timeout_s:g} s"
        )
        attempt.timer = asyncio.get_running_loop().call_later(timeout_s, attempt.abort, expired)
        return attempt

    def send(self, attempt: ExchangedAttempt, command: worker_pb2.AttemptCommand) -> None:
        """Queue a command about an attempt."""
        self._outgoing.append((attempt, command))
        self._has_outgoing.set()

    def forget(self, attempt: ExchangedAttempt) -> None:
        """An attempt has ended: what still comes of it is of no interest."""
        del self._attempts[attempt.number]

    def end(self, error: KvferryError) -> None:
        """End the stream, and every attempt with `error`."""
        if not self.has_ended:
            self.has_ended = True
            for attempt in tuple(self._attempts.values()):
                attempt.finish(error)
            self._outgoing.clear()
            self._call.cancel()

    async def close(self) -> None:
        """End the stream and wait for it."""
        self.end(connection_closed(self._info))
        await asyncio.wait({self._task})

    async def _run(self) -> None:
        """Converse until either side ends it; the task's outermost frame."""
        failure: KvferryError = connection_closed(self._info)
        try:
            with errors_of(self._info):
                await run_until_one_ends(self._read_all(), self._write_all())
        except KvferryError as error:
            # Whatever the stream ended with, its attempts may be tried elsewhere.
            failure = error if isinstance(error, WorkerUnavailable) else _broken(error)
        except Exception as error:  # noqa: BLE001 - outermost frame; ends what it served
            _log.exception("stream of attempts failed", extra={"worker_id": self._info.worker_id})
            failure = _broken(error)
        finally:
            self.end(failure)

    async def _read_all(self) -> None:
        while (events := await self._call.read()) is not grpc.aio.EOF:
            self._sort(events)
        raise WorkerUnavailable(f"worker {self._info.worker_id} ended the stream of attempts")

    def _sort(self, events: worker_pb2.AttemptEvents) -> None:
        find = self._attempts.get
        columns = (events.token_numbers, events.token_samples, events.token_ids)
        for number, sample, token_id in zip(*columns, strict=True):
            if (attempt := find(number)) is not None:
                attempt.deliver_token(sample, token_id)
        for output in events.outputs:
            if (attempt := find(output.number)) is not None:
                attempt.deliver(convert.attempt_output_from_wire(output))
        for error in events.errors:
            if (attempt := find(error.number)) is not None:
                attempt.finish(error_from_wire(error, self._info.worker_id))
        for number in events.ended:
            if (attempt := find(number)) is not None:
                attempt.finish(None)

    async def _write_all(self) -> None:
        while True:
            await self._has_outgoing.wait()
            self._has_outgoing.clear()
            while self._outgoing:
                message = self._next_message()
                if message.commands:
                    await self._call.write(message)

    def _next_message(self) -> worker_pb2.AttemptCommands:
        message = worker_pb2.AttemptCommands()
        tokens = 0
        while self._outgoing and tokens < _MESSAGE_PROMPT_TOKENS_MAX:
            attempt, command = self._outgoing.popleft()
            if command.HasField("start"):
                if attempt.has_ended:
                    continue  # before the worker has heard of it
                attempt.is_sent = True
                tokens += len(command.start.attempt.prompt)
            message.commands.append(command)
        return message


class ExchangedAttempt:
    """An `AttemptStream` whose outputs come with those of others."""

    __slots__ = (
        "_error",
        "_exchange",
        "_gathered",
        "_waiter",
        "has_ended",
        "is_sent",
        "number",
        "timer",
    )

    def __init__(self, exchange: AttemptExchange, number: int) -> None:
        self.number = number
        self.has_ended = False
        self.is_sent = False
        """Whether its start has left."""
        self.timer: asyncio.TimerHandle | None = None
        self._exchange = exchange
        self._error: KvferryError | None = None
        self._gathered: dict[int, _Gathered] = {}
        """What has not been read, by sample, the one that waits longest first."""
        self._waiter: asyncio.Future[None] | None = None

    # --- the reader ---

    async def read(self) -> AttemptOutput | None:
        """See `AttemptStream`."""
        while True:
            if self._gathered:
                sample = next(iter(self._gathered))
                return self._gathered.pop(sample).as_output(sample)
            if self._error is not None:
                raise self._error
            if self.has_ended:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def end_sample(self, sample: int) -> None:
        """See `AttemptStream`."""
        if not self.has_ended:
            wish = worker_pb2.EndSample(sample=sample)
            command = worker_pb2.AttemptCommand(number=self.number, end_sample=wish)
            self._exchange.send(self, command)

    def abort(self, error: KvferryError) -> None:
        """See `AttemptStream`."""
        if not self.has_ended:
            self._gathered.clear()
            self.finish(error)
            if self.is_sent:
                cancel = worker_pb2.CancelAttempt()
                command = worker_pb2.AttemptCommand(number=self.number, cancel=cancel)
                self._exchange.send(self, command)

    # --- the exchange ---

    def deliver_token(self, sample: int, token_id: int) -> None:
        """Gather a token for the reader."""
        gathered = self._gathered.get(sample)
        if gathered is None:
            gathered = self._gathered[sample] = _Gathered()
        gathered.tokens.append(OutputToken(token_id))
        if self._waiter is not None:
            self._wake()

    def deliver(self, output: AttemptOutput) -> None:
        """Gather an output for the reader."""
        gathered = self._gathered.setdefault(output.sample, _Gathered())
        gathered.tokens += output.tokens
        gathered.finish = output.finish
        gathered.usage = output.usage or gathered.usage
        gathered.marks = output.marks or gathered.marks
        self._wake()

    def finish(self, error: KvferryError | None) -> None:
        """The one end, after what was gathered; None of an attempt that has succeeded."""
        self.has_ended = True
        self._error = error
        if self.timer is not None:
            self.timer.cancel()
        self._exchange.forget(self)
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class _Gathered:
    """What has come of one sample since its reader took the last."""

    __slots__ = ("finish", "marks", "tokens", "usage")

    def __init__(self) -> None:
        self.tokens: list[OutputToken] = []
        self.finish: AttemptFinish | None = None
        self.usage: AttemptUsage | None = None
        self.marks: AttemptMarks | None = None

    def as_output(self, sample: int) -> AttemptOutput:
        """All of it as one output."""
        return AttemptOutput(tuple(self.tokens), self.finish, self.usage, sample, self.marks)


def _broken(error: Exception) -> WorkerUnavailable:
    return WorkerUnavailable(f"the stream of attempts broke: {error}")
