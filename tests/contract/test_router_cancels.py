"""A request that is ended at any moment, by whomever, leaves nothing in the router."""

from __future__ import annotations

import asyncio
import gc
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc.aio
import pytest

from kvferry.errors import InvalidInput
from kvferry.rpc.v1 import inference_pb2
from router.api.answer_streams import PromptFailed, answer_streams
from router.api.bounded_answer import bounded_answer
from router.api.messages import request_from_wire
from router.request_control import RequestControl
from router.response_stream import ResponseStream
from tests.support.fake_worker import FakeWorker, Script
from tests.support.router_bench import RouterBench, eventually, router_bench

if TYPE_CHECKING:
    from pathlib import Path

    from router.request import ClientRequest

SHORT, LONG, BEYOND = "ab" * 20, "ab " * 1500, "a" * 600
"""The second one is tokenized on another thread; neither it nor the third fits the context."""
EXPECTED = (asyncio.CancelledError, InvalidInput, PromptFailed)
ENDS = ("client leaves", "cancelled by its id", "both", "leaves twice")


KINDS = (RequestControl, ResponseStream)


def alive() -> list[object]:
    """Objects of requests."""
    gc.collect()
    # Their type, for to ask for its class has some objects of libraries do things.
    return [each for each in gc.get_objects() if type(each) in KINDS]


def left(before: list[object]) -> int:
    """How many came since; those of other tests may go meanwhile."""
    known = set(map(id, before))
    return sum(id(each) not in known for each in alive())


def request_of(number: int, text: str) -> ClientRequest:
    sampling = inference_pb2.SamplingParams(max_tokens=20, stop=["bab"], n=2)
    message = inference_pb2.GenerateRequest(
        request_id=f"r{number}", text=text, sampling=sampling, tenant=f"t{number % 3}"
    )
    return request_from_wire(message, seed=1, timeout_s=None, tenant=message.tenant)


async def read_one(bench: RouterBench, request: ClientRequest) -> None:
    """As over gRPC."""
    async with bounded_answer(bench.doors.metrics, request) as chunks:
        async for _ in chunks:
            await asyncio.sleep(0)


async def read_two(bench: RouterBench, request: ClientRequest) -> None:
    """As over HTTP."""
    requests = [request, replace(request, request_id=f"{request.request_id}-2")]
    async with answer_streams(bench.doors.metrics.generate, requests) as batches:
        async for _ in batches:
            await asyncio.sleep(0)


async def end_somewhere(bench: RouterBench, number: int, rng: random.Random) -> None:
    """One more request than has a place, and one of them ends after some turns of the loop."""
    texts = (rng.choice((SHORT, LONG, BEYOND)), SHORT, SHORT)
    requests = [request_of(3 * number + k, text) for k, text in enumerate(texts)]
    tasks = [asyncio.create_task(rng.choice((read_one, read_two))(bench, r)) for r in requests]
    for _ in range(rng.choice((number % 16, rng.randrange(300)))):
        await asyncio.sleep(0)
    how = rng.choice(ENDS)
    if how in ("cancelled by its id", "both"):
        bench.router.cancel(requests[0].request_id)
    if how != "cancelled by its id":
        tasks[0].cancel()
    if how == "leaves twice":
        await asyncio.sleep(0)
        tasks[0].cancel()
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        # Nothing but an end of its own, or a refusal that names the text.
        assert outcome is None or isinstance(outcome, EXPECTED), outcome
    assert bench.router.requests_in_flight == 0


def assert_nothing_left(bench: RouterBench, before: list[object]) -> None:
    classes = bench.router.admission_snapshot().classes.values()
    assert [(each.waiting, each.running) for each in classes] == 3 * [(0, 0)]
    assert bench.router.fleet.tokens_in_flight("w") == 0
    assert left(before) == 0


async def cancel_many(directory: Path, rounds: int) -> None:
    rng, before = random.Random(rounds), alive()
    worker = FakeWorker("w", script=lambda _: Script(hang_after=rng.choice((0, 2, 10))))
    async with asyncio.timeout(600), router_bench(directory, worker, requests_max=2) as bench:
        for number in range(rounds):
            await end_somewhere(bench, number, rng)
        await eventually(lambda: left(before) == 0)
        assert_nothing_left(bench, before)


def test_cancelled_at_any_moment(directory: Path) -> None:
    asyncio.run(cancel_many(directory, 24))


@pytest.mark.slow
def test_cancelled_at_any_moment_many_times(directory: Path) -> None:
    asyncio.run(cancel_many(directory, 3000))


def test_a_refusal_over_grpc_holds_nothing(directory: Path) -> None:
    async def main() -> None:
        before = alive()
        async with asyncio.timeout(60), router_bench(directory, FakeWorker("w")) as bench:
            call: Any = bench.inference.Generate(inference_pb2.GenerateRequest(text=BEYOND))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            await eventually(lambda: left(before) == 0)

    asyncio.run(main())
