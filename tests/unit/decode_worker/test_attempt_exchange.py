"""The worker's end of the stream of attempts, over a pipe and an engine thread that is none."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
import pytest

from decode_worker import attempt_exchange
from decode_worker.attempt_exchange import AttemptExchange
from decode_worker.intake import CancelAttempt, EndSample, StartAttempt
from kvferry.cache_key import CacheUse
from kvferry.convert import attempt_request_to_wire
from kvferry.errors import InternalError, InvalidInput, Overloaded, WorkerUnavailable
from kvferry.generation import (
    AttemptFinish,
    AttemptOutput,
    AttemptRequest,
    AttemptUsage,
    FinishReason,
    OutputToken,
    TokenLogprobs,
)
from kvferry.ids import Attempt, AttemptId, ExtraKey, Incarnation, RequestId, WorkerId
from kvferry.membership import Role, WorkerInfo
from kvferry.rpc.v1 import worker_pb2 as pb
from kvferry.sampling import SamplingParams
from tests.support.message_pipe import MessagePipe
from tests.support.router_bench import eventually

INFO = WorkerInfo(WorkerId("decode-0"), Role.DECODE, Incarnation(7), "nowhere:1")
FINISH = AttemptOutput((), AttemptFinish(FinishReason.LENGTH, AttemptUsage()))


class FakeStepLoop:
    """Keeps what was posted."""

    def __init__(self):
        self.alive = True
        self.events = []
        self.fault = None

    def is_alive(self):
        return self.alive

    def now(self):
        return 0.0

    def post(self, event):
        if self.fault is not None:
            raise self.fault
        self.events.append(event)

    def stream(self, number):
        """Of the attempt that was started as `number`."""
        return next(
            event.stream
            for event in self.events
            if isinstance(event, StartAttempt) and event.stream.number == number
        )

    def posted(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


def start(number, *, incarnation=7, n=1, timeout_s=20.0):
    request = AttemptRequest(
        id=AttemptId(RequestId(f"r{number}"), Attempt(1)),
        prompt=np.array([1, 2], np.int32),
        sampling=SamplingParams(n=n),
        cache_use=CacheUse(ExtraKey("")),
        source=None,
    )
    message = attempt_request_to_wire(request, Incarnation(incarnation))
    return pb.AttemptCommand(
        number=number, start=pb.StartAttempt(attempt=message, timeout_s=timeout_s)
    )


def cancel(number):
    return pb.AttemptCommand(number=number, cancel=pb.CancelAttempt())


def token(id_, sample=0, alternatives=None):
    logprobs = None
    if alternatives is not None:
        logprobs = TokenLogprobs(id_, -1.0, ((id_, -1.0),) * alternatives)
    return AttemptOutput((OutputToken(id_, logprobs),), sample=sample)


def finish(sample):
    return AttemptOutput((), FINISH.finish, sample=sample)


class Scene:
    """A running exchange."""

    def __init__(self):
        self.pipe = MessagePipe()
        self.step_loop = FakeStepLoop()
        self.task = asyncio.create_task(AttemptExchange(INFO, self.step_loop).run(self.pipe))

    async def send(self, *commands):
        """Let the worker take these commands."""
        self.pipe.feed(pb.AttemptCommands(commands=commands))
        await self.settle()

    async def settle(self):
        for _ in range(10):
            await asyncio.sleep(0)

    def say(self, number, *items):
        for item in items:
            self.step_loop.stream(number).deliver(item)

    @property
    def said(self):
        """Number, sample and tokens of all that has left, in the order in which it counts."""
        return [entry for message in self.pipe.written for entry in said_in(message)]

    @property
    def errors(self):
        return [error for message in self.pipe.written for error in message.errors]

    @property
    def ended(self):
        return [number for message in self.pipe.written for number in message.ended]


def said_in(message):
    columns = zip(message.token_numbers, message.token_samples, message.token_ids, strict=True)
    return [
        *((number, sample, [id_]) for number, sample, id_ in columns),
        *((output.number, output.sample, list(output.token_ids)) for output in message.outputs),
    ]


def run(scenario):
    async def main():
        async with asyncio.timeout(60):
            scene = Scene()
            await scenario(scene)
            scene.pipe.end()
            with contextlib.suppress(WorkerUnavailable, InvalidInput):
                await scene.task

    asyncio.run(main())


def test_what_a_turn_says_of_all_attempts_leaves_in_one_message():
    async def scenario(scene):
        await scene.send(start(1), start(2))
        for number in (1, 2):
            scene.say(number, token(10 * number), token(10 * number + 1))
        await scene.settle()
        assert len(scene.pipe.written) == 1
        assert scene.said == [(1, 0, [10]), (1, 0, [11]), (2, 0, [20]), (2, 0, [21])]

    run(scenario)


def test_what_comes_while_a_message_is_written_leaves_in_the_next_one():
    async def scenario(scene):
        await scene.send(start(1))
        scene.pipe.flows.clear()
        for id_ in range(5):
            scene.say(1, token(id_))
            await scene.settle()
        scene.pipe.flows.set()
        await scene.settle()
        assert [len(said_in(message)) for message in scene.pipe.written] == [1, 4]

    run(scenario)


def test_no_token_overtakes_what_its_attempt_said_before():
    async def scenario(scene):
        await scene.send(start(1, n=2), start(2))
        known = AttemptOutput((), usage=AttemptUsage(moved_tokens=3))
        scene.say(1, token(10), known, token(11, sample=1), token(12), finish(0))
        scene.say(2, token(20))
        await scene.settle()
        (message,) = scene.pipe.written
        assert said_in(message) == [
            (1, 0, [10]),
            (2, 0, [20]),
            (1, 0, []),
            (1, 1, [11]),
            (1, 0, [12]),
            (1, 0, []),
        ]
        assert [output.usage.moved_tokens for output in message.outputs] == [3, 0, 0, 0]

    run(scenario)


def test_a_message_has_a_bounded_number_of_entries(monkeypatch):
    monkeypatch.setattr(attempt_exchange, "_MESSAGE_ENTRIES_MAX", 6)

    async def scenario(scene):
        await scene.send(start(1))
        scene.say(1, *(token(id_, alternatives=2) for id_ in range(5)), FINISH)
        await scene.settle()
        assert [len(message.outputs) for message in scene.pipe.written] == [2, 2, 2]
        assert [list(message.ended) for message in scene.pipe.written] == [[], [], [1]]

    run(scenario)


def test_an_attempt_ends_with_the_last_of_its_samples():
    async def scenario(scene):
        await scene.send(start(1, n=2))
        scene.say(1, finish(1))
        await scene.settle()
        assert scene.ended == []
        scene.say(1, token(5), finish(0))
        await scene.settle()
        assert scene.ended == [1]
        scene.say(1, token(6))
        await scene.settle()
        assert scene.said == [(1, 1, []), (1, 0, [5]), (1, 0, [])]

    run(scenario)


def test_an_error_is_the_end_of_its_attempt_alone():
    async def scenario(scene):
        await scene.send(start(1), start(2))
        scene.say(1, token(5), Overloaded("full", 2.5), token(6))
        scene.say(2, token(7))
        await scene.settle()
        (error,) = scene.errors
        assert (error.number, error.kind, error.retry_after_s) == (1, "overloaded", 2.5)
        assert scene.said == [(1, 0, [5]), (2, 0, [7])]

    run(scenario)


def test_an_attempt_meant_for_another_incarnation_reaches_no_engine():
    async def scenario(scene):
        await scene.send(start(1, incarnation=6), start(2))
        assert [event.stream.number for event in scene.step_loop.events] == [2]
        (error,) = scene.errors
        assert (error.number, error.kind) == (1, "unavailable")
        assert "incarnation 6 of decode-0 is gone" in error.message

    run(scenario)


def test_a_fault_of_ours_ends_its_attempt_alone():
    async def scenario(scene):
        scene.step_loop.fault = ValueError("a bug")
        await scene.send(start(1))
        scene.step_loop.fault = None
        await scene.send(start(2))
        (error,) = scene.errors
        assert (error.number, error.kind) == (1, "internal")
        assert [event.stream.number for event in scene.step_loop.events] == [2]

    run(scenario)


def test_a_cancelled_attempt_says_nothing_more_and_the_others_go_on():
    async def scenario(scene):
        await scene.send(start(1), start(2), cancel(1), cancel(1), cancel(99))
        (event,) = scene.step_loop.posted(CancelAttempt)
        assert (event.id, event.stream.number) == (AttemptId("r1", 1), 1)
        scene.say(1, token(5), InternalError("cancelled"))
        scene.say(2, token(6))
        await scene.settle()
        assert scene.said == [(2, 0, [6])]
        assert scene.errors == []

    run(scenario)


def test_the_end_of_a_sample_is_passed_on_while_its_attempt_runs():
    async def scenario(scene):
        wish = pb.AttemptCommand(number=1, end_sample=pb.EndSample(sample=1))
        await scene.send(wish, start(1, n=2), wish)
        assert scene.step_loop.posted(EndSample) == [EndSample(AttemptId("r1", 1), 1)]
        scene.say(1, InternalError("ends"))
        await scene.send(wish)
        assert len(scene.step_loop.posted(EndSample)) == 1

    run(scenario)


def test_an_attempt_whose_router_forgets_it_ends_by_itself():
    async def scenario(scene):
        await scene.send(start(1, timeout_s=0.02), start(2))
        await eventually(lambda: scene.errors != [])
        (error,) = scene.errors
        assert (error.number, error.kind) == (1, "deadline")
        assert [event.stream.number for event in scene.step_loop.posted(CancelAttempt)] == [1]

    run(scenario)


@pytest.mark.parametrize("how", ["end", "cancel"])
def test_the_end_of_the_stream_cancels_what_runs_and_nothing_else(how):
    async def scenario(scene):
        await scene.send(start(1), start(2))
        scene.say(1, FINISH)
        await scene.settle()
        if how == "end":
            scene.pipe.end()
        else:
            scene.task.cancel()
        await asyncio.wait({scene.task})
        assert [event.stream.number for event in scene.step_loop.posted(CancelAttempt)] == [2]

    run_until_end(scenario)


def run_until_end(scenario):
    async def main():
        async with asyncio.timeout(60):
            await scenario(Scene())

    asyncio.run(main())


def test_a_router_that_does_not_read_is_given_up_at_the_bound(monkeypatch):
    monkeypatch.setattr(attempt_exchange, "BACKLOG_MAX", 10)

    async def scenario(scene):
        await scene.send(start(1), start(2))
        scene.pipe.flows.clear()
        scene.say(1, *(token(id_) for id_ in range(10)))
        assert scene.step_loop.posted(CancelAttempt) == []
        scene.say(2, token(1))
        # At once, before anything else has run.
        assert len(scene.step_loop.posted(CancelAttempt)) == 2
        with pytest.raises(WorkerUnavailable, match="left 10 tokens unread"):
            await scene.task

    run_until_end(scenario)


def test_a_router_that_takes_nothing_for_too_long_is_given_up(monkeypatch):
    monkeypatch.setattr(attempt_exchange, "WRITE_TIMEOUT_S", 0.02)

    async def scenario(scene):
        await scene.send(start(1))
        scene.pipe.flows.clear()
        scene.say(1, token(1))
        with pytest.raises(WorkerUnavailable, match=r"has not read for 0.02 s"):
            await scene.task
        assert len(scene.step_loop.posted(CancelAttempt)) == 1

    run_until_end(scenario)


def test_a_dead_engine_ends_the_stream_when_its_last_words_are_out(monkeypatch):
    monkeypatch.setattr(attempt_exchange, "WRITER_CHECK_INTERVAL_S", 0.01)

    async def scenario(scene):
        await scene.send(start(1))
        scene.pipe.flows.clear()
        scene.say(1, token(1))
        scene.step_loop.alive = False
        await asyncio.sleep(0.05)
        assert not scene.task.done()
        scene.pipe.flows.set()
        with pytest.raises(WorkerUnavailable, match="the engine has stopped"):
            await scene.task
        assert scene.said == [(1, 0, [1])]

    run_until_end(scenario)


@pytest.mark.parametrize(
    ("commands", "field"),
    [([start(1), start(1)], "number"), ([pb.AttemptCommand(number=1)], "commands")],
)
def test_what_no_router_of_ours_sends_ends_the_stream(commands, field):
    async def scenario(scene):
        await scene.send(*commands)
        with pytest.raises(InvalidInput, match=field):
            await scene.task

    run_until_end(scenario)
