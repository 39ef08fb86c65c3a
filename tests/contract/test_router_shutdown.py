"""What clients see of a router that is stopped, at each front door, as its process does it."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import aiohttp
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvferry.rpc.v1 import inference_pb2
from tests.support.fake_worker import FakeWorker, Script
from tests.support.router_bench import SERVED, RouterBench, eventually, router_bench

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

LONG_S = 60.0
QUESTION = {"model": SERVED, "prompt": "ab", "stream": True}
RETRY_HEADERS = ("Retry-After", "Retry-After-Ms")


def run(directory: Path, test: Callable[[RouterBench], Awaitable[None]], script: Script) -> None:
    worker = FakeWorker("w", script=lambda _: script)

    async def main() -> None:
        async with asyncio.timeout(60), router_bench(directory, worker) as bench:
            await test(bench)

    asyncio.run(main())


async def close_doors(bench: RouterBench) -> None:
    await asyncio.gather(bench.front_door.stop(1.0), bench.http_door.stop(1.0))


async def events_of(response: aiohttp.ClientResponse) -> list[str]:
    text = (await response.read()).decode()
    return [event.removeprefix("data: ") for event in text.split("\n\n") if event]


def test_answers_that_outlive_the_grace_end_with_an_error(directory: Path) -> None:
    async def test(bench: RouterBench) -> None:
        call = bench.inference.Generate(inference_pb2.GenerateRequest(text="ab"))
        await call.read()
        async with (
            aiohttp.ClientSession(bench.http_url) as session,
            session.post("/v1/completions", json=QUESTION) as stream,
        ):
            assert stream.status == 200
            stopping = asyncio.create_task(bench.router.wind_down(LONG_S))
            await _stays_open(bench, session, call)
            assert not stopping.done()
            # The grace is over.
            await bench.router.wind_down(0.0)
            closing = asyncio.create_task(close_doors(bench))
            *_, last = await events_of(stream)
            error = json.loads(last)["error"]
            assert error["type"] == "service_unavailable_error"
            assert error["message"] == "the router is shutting down"
            with pytest.raises(grpc.aio.AioRpcError, match="the router is shutting down") as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            await closing
            await stopping
        assert bench.router.requests_in_flight == 0

    run(directory, test, Script(hang_after=1))


async def _stays_open(bench: RouterBench, session: aiohttp.ClientSession, call: Any) -> None:
    """Within the grace: new requests are told when to ask again, running ones go on."""
    await eventually(lambda: not bench.router.is_ready)
    async with session.get("/ready") as ready, session.get("/health") as health:
        assert (ready.status, health.status) == (503, 200)
    asked, statuses = health_pb2.HealthCheckRequest(), health_pb2.HealthCheckResponse
    health_stub = health_pb2_grpc.HealthStub(bench.channel)
    while (await health_stub.Check(asked)).status != statuses.NOT_SERVING:
        pass
    async with session.post("/v1/completions", json=QUESTION) as refused:
        assert refused.status == 503
        assert [refused.headers[name] for name in RETRY_HEADERS] == ["1", "1000"]
    with pytest.raises(grpc.aio.AioRpcError, match="shutting down") as caught:
        await bench.ask()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert ("grpc-retry-pushback-ms", "1000") in tuple(caught.value.trailing_metadata() or ())
    assert not call.done()


def test_answers_within_the_grace_are_whole(directory: Path) -> None:
    async def test(bench: RouterBench) -> None:
        go_on = asyncio.Event()
        real = bench.router.generate

        async def held_up(request: Any) -> Any:
            async for chunk in real(request):
                yield chunk
                await go_on.wait()

        bench.router.generate = held_up  # type: ignore[method-assign]
        async with (
            aiohttp.ClientSession(bench.http_url) as session,
            session.post("/v1/completions", json=QUESTION) as stream,
        ):
            responses = aiter(bench.inference.Generate(inference_pb2.GenerateRequest(text="ab")))
            await anext(responses)
            stopping = asyncio.create_task(bench.router.wind_down(LONG_S))
            await eventually(lambda: not bench.router.is_ready)
            assert not stopping.done()
            go_on.set()
            assert (await events_of(stream))[-1] == "[DONE]"
            *_, last = [response async for response in responses]
            assert last.finish.reason == inference_pb2.FINISH_REASON_STOP
            await stopping
        await close_doors(bench)

    run(directory, test, Script())


def test_without_requests_nothing_is_waited_for(directory: Path) -> None:
    async def test(bench: RouterBench) -> None:
        async with asyncio.timeout(60):
            await bench.router.wind_down(LONG_S)
            await close_doors(bench)

    run(directory, test, Script())
