"""The router's end of the stream of attempts, over a pipe."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import numpy as np
import pytest

from kvferry.cache_key import CacheUse
from kvferry.convert import attempt_output_to_wire
from kvferry.error_wire import attempt_error_to_wire
from kvferry.errors import DeadlineExceeded, Overloaded, RequestCancelled, WorkerUnavailable
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
from kvferry.rpc.v1 import worker_pb2 as pb
from kvferry.sampling import SamplingParams
from router import attempt_exchange
from router.attempt_exchange import AttemptExchange
from tests.support.message_pipe import MessagePipe

INFO = WorkerInfo(WorkerId("decode-0"), Role.DECODE, Incarnation(7), "nowhere:1")
FINISH = AttemptFinish(FinishReason.LENGTH, AttemptUsage(moved_tokens=3))


def request(prompt_tokens=2):
    return AttemptRequest(
        id=AttemptId(RequestId("r"), Attempt(1)),
        prompt=np.arange(prompt_tokens, dtype=np.int32),
        sampling=SamplingParams(n=2),
        cache_use=CacheUse(ExtraKey("")),
        source=None,
    )


def output(*ids, sample=0, finish=None, usage=None):
    return AttemptOutput(tuple(map(OutputToken, ids)), finish, usage, sample)


class Scene:
    """A running exchange."""

    def __init__(self):
        self.pipe = MessagePipe()
        self.exchange = AttemptExchange(self.pipe, INFO)

    def start(self, timeout_s=20.0, **options):
        return self.exchange.start(request(**options), timeout_s)

    async def hear(self, number, *items, ended=False):
        """Let the worker say this of an attempt, in one message."""
        events = pb.AttemptEvents(ended=[number] if ended else [])
        for item in items:
            if isinstance(item, AttemptOutput):
                events.outputs.append(attempt_output_to_wire(item, number))
            else:
                events.errors.append(attempt_error_to_wire(number, item))
        self.pipe.feed(events)
        await self.settle()

    async def settle(self):
        for _ in range(10):
            await asyncio.sleep(0)

    @property
    def sent(self):
        """Kinds and numbers of the commands of each message."""
        return [
            [(command.WhichOneof("command"), command.number) for command in message.commands]
            for message in self.pipe.written
        ]


def run(scenario):
    async def main():
        async with asyncio.timeout(60):
            scene = Scene()
            await scenario(scene)
            await scene.exchange.close()

    asyncio.run(main())


def test_commands_given_at_once_leave_together():
    async def scenario(scene):
        first = scene.start()
        scene.start()
        first.end_sample(1)
        await scene.settle()
        assert scene.sent == [[("start", 1), ("start", 2), ("end_sample", 1)]]
        start = scene.pipe.written[0].commands[0].start
        assert (start.attempt.incarnation, start.timeout_s) == (7, 20.0)

    run(scenario)


def test_long_prompts_leave_in_messages_of_their_own(monkeypatch):
    monkeypatch.setattr(attempt_exchange, "_MESSAGE_PROMPT_TOKENS_MAX", 10)

    async def scenario(scene):
        for prompt_tokens in (6, 6, 30, 1):
            scene.start(prompt_tokens=prompt_tokens)
        await scene.settle()
        assert [len(message.commands) for message in scene.pipe.written] == [2, 1, 1]

    run(scenario)


def test_what_came_since_the_last_read_is_one_output_per_sample():
    async def scenario(scene):
        attempt = scene.start()
        usage = AttemptUsage(decode_hit_tokens=2)
        await scene.hear(1, output(usage=usage), output(5), output(8, sample=1))
        await scene.hear(1, output(6), output(7, finish=FINISH), output(sample=1, finish=FINISH))
        await scene.hear(1, ended=True)
        assert await attempt.read() == output(5, 6, 7, finish=FINISH, usage=usage)
        assert await attempt.read() == output(8, sample=1, finish=FINISH)
        assert await attempt.read() is None
        assert await attempt.read() is None

    run(scenario)


def test_tokens_in_columns_come_before_the_outputs_beside_them():
    async def scenario(scene):
        one, other = scene.start(), scene.start()
        events = pb.AttemptEvents(
            token_numbers=[1, 2, 1, 99, 1],
            token_samples=[0, 0, 1, 0, 0],
            token_ids=[5, 6, 7, 8, 9],
            outputs=[attempt_output_to_wire(output(10, finish=FINISH), 1)],
        )
        scene.pipe.feed(events)
        await scene.settle()
        assert await one.read() == output(5, 9, 10, finish=FINISH)
        assert await one.read() == output(7, sample=1)
        assert await other.read() == output(6)

    run(scenario)


def test_columns_of_different_lengths_end_the_stream():
    async def scenario(scene):
        attempt = scene.start()
        scene.pipe.feed(pb.AttemptEvents(token_numbers=[1, 1], token_ids=[5, 6]))
        await scene.settle()
        with pytest.raises(WorkerUnavailable, match="the stream of attempts broke"):
            await attempt.read()

    run(scenario)


def test_a_token_that_somebody_waits_for_does_not_wait_for_another_one():
    async def scenario(scene):
        attempt = scene.start()
        reading = asyncio.create_task(attempt.read())
        await scene.settle()
        await scene.hear(1, output(5))
        assert reading.done()
        assert reading.result() == output(5)

    run(scenario)


def test_an_error_comes_after_what_was_said_before_and_ends_its_attempt_alone():
    async def scenario(scene):
        one, other = scene.start(), scene.start()
        await scene.hear(1, output(5), Overloaded("the queue is full", 2.5))
        await scene.hear(2, output(6))
        assert await one.read() == output(5)
        for _ in range(2):
            with pytest.raises(Overloaded, match="worker decode-0: the queue is full") as refused:
                await one.read()
        assert refused.value.retry_after_s == 2.5
        assert await other.read() == output(6)

    run(scenario)


def test_an_abort_ends_one_attempt_at_once_and_tells_the_worker():
    async def scenario(scene):
        one, other = scene.start(), scene.start()
        await scene.settle()
        await scene.hear(1, output(5))
        one.abort(RequestCancelled("enough"))
        one.abort(WorkerUnavailable("later"))
        with pytest.raises(RequestCancelled, match="enough"):
            await one.read()
        await scene.hear(1, output(6))
        await scene.hear(2, output(7))
        assert await other.read() == output(7)
        assert scene.sent == [[("start", 1), ("start", 2)], [("cancel", 1)]]

    run(scenario)


def test_an_abort_wakes_who_waits():
    async def scenario(scene):
        attempt = scene.start()
        reading = asyncio.create_task(attempt.read())
        await scene.settle()
        attempt.abort(RequestCancelled("enough"))
        with pytest.raises(RequestCancelled, match="enough"):
            await reading

    run(scenario)


def test_an_attempt_that_ended_is_not_aborted():
    async def scenario(scene):
        attempt = scene.start()
        await scene.settle()
        await scene.hear(1, output(5, finish=FINISH), ended=True)
        attempt.abort(RequestCancelled("too late"))
        attempt.end_sample(0)
        await scene.settle()
        assert await attempt.read() == output(5, finish=FINISH)
        assert await attempt.read() is None
        assert scene.sent == [[("start", 1)]]

    run(scenario)


def test_an_attempt_that_was_aborted_before_it_left_is_never_sent():
    async def scenario(scene):
        scene.pipe.flows.clear()
        scene.start()
        await scene.settle()
        unsent = scene.start()
        unsent.abort(RequestCancelled("enough"))
        scene.pipe.flows.set()
        scene.start()
        await scene.settle()
        assert scene.sent == [[("start", 1)], [("start", 3)]]

    run(scenario)


def test_an_attempt_ends_with_its_deadline():
    async def scenario(scene):
        attempt, other = scene.start(timeout_s=0.2), scene.start()
        await scene.settle()
        with pytest.raises(DeadlineExceeded, match=r"worker decode-0 was not done within 0.2 s"):
            await attempt.read()
        await scene.settle()
        assert scene.sent == [[("start", 1), ("start", 2)], [("cancel", 1)]]
        await scene.hear(2, output(7))
        assert await other.read() == output(7)

    run(scenario)


def _rpc_error(code):
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, nothing, nothing, details="out of luck")


@pytest.mark.parametrize(
    ("break_", "words"),
    [
        (grpc.aio.EOF, "worker decode-0 ended the stream of attempts"),
        (_rpc_error(grpc.StatusCode.UNAVAILABLE), "worker decode-0: out of luck"),
        (_rpc_error(grpc.StatusCode.INTERNAL), "worker decode-0: out of luck"),
        (asyncio.CancelledError(), "the connection to worker decode-0 was closed"),
        (ValueError("a bug"), "the stream of attempts broke: a bug"),
    ],
)
def test_a_broken_stream_ends_all_its_attempts_after_what_they_have_said(break_, words):
    async def scenario(scene):
        one, other = scene.start(), scene.start()
        reading = asyncio.create_task(other.read())
        await scene.hear(1, output(5))
        scene.pipe.feed(break_)
        assert await one.read() == output(5)
        for broken in (one.read(), reading):
            with pytest.raises(WorkerUnavailable, match=words):
                await broken
        assert scene.exchange.has_ended

    run(scenario)


def test_a_worker_given_up_ends_everything_with_the_reason():
    async def scenario(scene):
        scene.pipe.flows.clear()
        attempt = scene.start()
        await scene.settle()
        scene.exchange.end(WorkerUnavailable("has not answered"))
        with pytest.raises(WorkerUnavailable, match="has not answered"):
            await attempt.read()
        assert scene.pipe.is_cancelled

    run(scenario)
