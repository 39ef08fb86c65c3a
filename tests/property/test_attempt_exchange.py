"""Both ends of the stream of attempts, joined: each attempt has its tokens, and exactly one end.

The engine is a script that says things in random order; the router starts, aborts and reads at
random, and the stream may break at any time.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker import attempt_exchange as worker_end
from decode_worker.attempt_stream import Outbox
from decode_worker.intake import CancelAttempt, StartAttempt
from kvferry.cache_key import CacheUse
from kvferry.errors import InternalError, KvferryError, RequestCancelled, WorkerUnavailable
from kvferry.generation import (
    AttemptFinish,
    AttemptOutput,
    AttemptRequest,
    AttemptUsage,
    FinishReason,
    OutputToken,
)
from kvferry.ids import Attempt, AttemptId, ExtraKey, Incarnation, RequestId, WorkerId
from kvferry.membership import Role, WorkerInfo
from kvferry.sampling import SamplingParams
from router import attempt_exchange as router_end

pytestmark = pytest.mark.property

INFO = WorkerInfo(WorkerId("w"), Role.DECODE, Incarnation(7), "nowhere:1")


class Wire:
    """One direction."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Any] = asyncio.Queue(maxsize=2)


class Side:
    """A `MessageStream` over two wires."""

    def __init__(self, reads: Wire, writes: Wire) -> None:
        self._reads, self._writes = reads, writes

    async def read(self) -> Any:
        message = await self._reads.messages.get()
        if isinstance(message, BaseException):
            raise message
        return message

    async def write(self, message: Any) -> None:
        # A copy, as on a real wire.
        await self._writes.messages.put(type(message).FromString(message.SerializeToString()))

    def cancel(self) -> None:
        self.break_off()

    def break_off(self) -> None:
        for wire in (self._reads, self._writes):
            while not wire.messages.empty():
                wire.messages.get_nowait()
        self._reads.messages.put_nowait(asyncio.CancelledError())
        self._writes.messages.put_nowait(grpc.aio.EOF)


class Engine:
    """Says the tokens 0, 1, 2... of each sample, and its end after `length`, when told to."""

    def __init__(self, loop: asyncio.AbstractEventLoop, lengths: list[int]) -> None:
        self._outbox = Outbox(loop)
        self._lengths = lengths
        self.running: dict[AttemptId, tuple[Any, list[int]]] = {}
        self.ended: list[AttemptId] = []

    def is_alive(self) -> bool:
        return True

    def now(self) -> float:
        return 0.0

    def post(self, event: Any) -> None:
        match event:
            case StartAttempt(attempt, stream, _):
                self.running[attempt.id] = (stream, [0] * attempt.sampling.n)
            case CancelAttempt(attempt_id, stream) if attempt_id in self.running:
                self._outbox.put(stream, RequestCancelled("cancelled by the router"))
                self._end(attempt_id)

    def step(self, *, fails: bool) -> None:
        """One token of every unfinished sample; the first attempt may fail instead."""
        for attempt_id, (stream, said) in list(self.running.items()):
            if fails:
                fails = False
                self._outbox.put(stream, InternalError("scripted"))
                self._end(attempt_id)
                continue
            for sample, count in enumerate(said):
                length = self._length(attempt_id)
                if count <= length:
                    self._outbox.put(stream, self._output(sample, count, length))
                    said[sample] += 1
            if all(count > self._length(attempt_id) for count in said):
                self._end(attempt_id)
        self._outbox.flush()

    def _output(self, sample: int, count: int, length: int) -> AttemptOutput:
        if count == length:
            finish = AttemptFinish(FinishReason.LENGTH, AttemptUsage(moved_tokens=length))
            return AttemptOutput((), finish, sample=sample)
        return AttemptOutput((OutputToken(count),), sample=sample)

    def _length(self, attempt_id: AttemptId) -> int:
        return self._lengths[attempt_id.attempt % len(self._lengths)]

    def _end(self, attempt_id: AttemptId) -> None:
        del self.running[attempt_id]
        self.ended.append(attempt_id)


class Reader:
    """Reads one attempt and keeps the account of it."""

    def __init__(self, stream: Any, samples: int) -> None:
        self.stream = stream
        self.tokens: list[list[int]] = [[] for _ in range(samples)]
        self.finished: list[int] = []
        self.error: KvferryError | None = None
        self.task = asyncio.create_task(self._read_all())

    async def _read_all(self) -> None:
        try:
            while (output := await self.stream.read()) is not None:
                assert output.sample not in self.finished, "said after its finish"
                self.tokens[output.sample] += [token.token_id for token in output.tokens]
                if output.finish is not None:
                    self.finished.append(output.sample)
        except KvferryError as error:
            self.error = error


MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.integers(1, 3)),
        st.tuples(st.just("abort"), st.integers(0, 9)),
        st.tuples(st.just("step"), st.booleans()),
        st.tuples(st.just("pause"), st.integers(0, 4)),
    ),
    max_size=30,
)


async def play(moves: list[tuple[str, Any]], lengths: list[int], breaks: bool) -> None:
    down, up = Wire(), Wire()
    engine = Engine(asyncio.get_running_loop(), lengths)
    far = worker_end.AttemptExchange(INFO, engine)  # type: ignore[arg-type]
    serving = asyncio.create_task(far.run(Side(reads=up, writes=down)))
    near_side = Side(reads=down, writes=up)
    near = router_end.AttemptExchange(near_side, INFO)
    readers: list[Reader] = []
    for move, value in moves:
        match move:
            case "start":
                request = AttemptRequest(
                    id=AttemptId(RequestId("r"), Attempt(len(readers) + 1)),
                    prompt=np.array([1], np.int32),
                    sampling=SamplingParams(n=value),
                    cache_use=CacheUse(ExtraKey("")),
                    source=None,
                )
                readers.append(Reader(near.start(request, 60.0), value))
            case "abort" if value < len(readers):
                readers[value].stream.abort(RequestCancelled("enough"))
            case "step":
                engine.step(fails=value)
            case "pause":
                for _ in range(value):
                    await asyncio.sleep(0)
    if breaks:
        near_side.break_off()
    else:
        while any(not reader.task.done() for reader in readers):
            engine.step(fails=False)
            await asyncio.sleep(0)
    await asyncio.gather(*(reader.task for reader in readers))
    await near.close()
    await asyncio.wait({serving})
    assert not engine.running, "an attempt without a router goes on"
    assert len(engine.ended) == len(set(engine.ended))
    for number, reader in enumerate(readers, 1):
        check(reader, lengths[number % len(lengths)], breaks)


def check(reader: Reader, length: int, breaks: bool) -> None:
    for sample, tokens in enumerate(reader.tokens):
        assert tokens == list(range(len(tokens))), "lost, doubled or out of order"
        assert (sample in reader.finished) <= (len(tokens) == length)
    if reader.error is None:
        assert sorted(reader.finished) == list(range(len(reader.tokens)))
    else:
        expected = (RequestCancelled, InternalError) + ((WorkerUnavailable,) if breaks else ())
        assert isinstance(reader.error, expected)


@given(MOVES, st.lists(st.integers(0, 6), min_size=1, max_size=4), st.booleans())
def test_every_attempt_has_its_tokens_and_one_end(
    moves: list[tuple[str, Any]], lengths: list[int], breaks: bool
) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            await play(moves, lengths, breaks)

    asyncio.run(main())
