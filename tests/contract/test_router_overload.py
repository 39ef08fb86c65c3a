"""Overload seen from outside: queues, limits, hints, ends. Real gRPC, scripted workers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest

from kvferry.accounts import WorkerLoad
from kvferry.router_config import ServiceClassConfig, ServiceClassesConfig, TenantConfig
from kvferry.rpc.v1 import inference_pb2
from router.request import ServiceClass
from router.tenants import RefusalReason
from tests.support.fake_worker import FakeWorker, Script
from tests.support.router_bench import RouterBench, eventually, router_bench, text_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from router.admission_snapshot import ClassSnapshot

Request = inference_pb2.GenerateRequest


def hanging() -> FakeWorker:
    return FakeWorker("w", script=lambda _: Script(hang_after=1))


def run(
    directory: Path,
    test: Callable[[RouterBench], Awaitable[None]],
    *workers: FakeWorker,
    **settings: Any,
) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), router_bench(directory, *workers, **settings) as bench:
            await test(bench)
            await eventually(lambda: bench.router.requests_in_flight == 0)
            snapshot = bench.router.admission_snapshot()
            assert snapshot.places_taken == 0
            assert {(each.waiting, each.running) for each in snapshot.classes.values()} == {(0, 0)}

    asyncio.run(main())


def standard(bench: RouterBench) -> ClassSnapshot:
    return bench.router.admission_snapshot().classes[ServiceClass.STANDARD]


async def fill(bench: RouterBench, count: int, **fields: Any) -> list[Any]:
    """So many requests that hold their places until they are cancelled."""
    calls = []
    for _ in range(count):
        calls.append(bench.inference.Generate(Request(text="ab", **fields)))
        await calls[-1].read()
    return calls


async def refused(bench: RouterBench, **fields: Any) -> tuple[str, int]:
    """What a client is told that may try again, and after how many milliseconds."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await bench.ask("ab", **fields)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    hints = dict(caught.value.trailing_metadata() or ())
    return caught.value.details() or "", int(hints["grpc-retry-pushback-ms"])


def test_who_finds_no_place_waits_for_one(directory: Path) -> None:
    worker = hanging()

    async def test(bench: RouterBench) -> None:
        (call,) = await fill(bench, 1)
        waiting = asyncio.create_task(bench.ask("abc"))
        await eventually(lambda: standard(bench).waiting == 1)
        assert len(worker.requests) == 1
        worker.script = lambda _: Script()
        call.cancel()
        assert text_of(await waiting) == "abc"
        assert standard(bench).granted == 2
        assert standard(bench).wait_s_total > 0

    run(directory, test, worker, requests_max=1)


def test_a_full_queue_refuses_at_once(directory: Path) -> None:
    async def test(bench: RouterBench) -> None:
        (call,) = await fill(bench, 1)
        waiting = bench.inference.Generate(Request(text="ab"))
        asyncio.get_running_loop().create_task(_read(waiting))
        await eventually(lambda: standard(bench).waiting == 1)
        words, after_ms = await refused(bench)
        assert words.startswith("1 requests of class standard wait already")
        assert after_ms >= 100
        assert standard(bench).refused[RefusalReason.QUEUE_FULL] == 1
        # Another class has a queue of its own.
        quick = bench.inference.Generate(
            Request(text="ab", service_class=inference_pb2.SERVICE_CLASS_INTERACTIVE)
        )
        asyncio.get_running_loop().create_task(_read(quick))
        classes = bench.router.admission_snapshot
        await eventually(lambda: classes().classes[ServiceClass.INTERACTIVE].waiting == 1)
        for each in (call, waiting, quick):
            each.cancel()

    one = ServiceClassesConfig(standard=ServiceClassConfig(queue_max=1))
    run(directory, test, hanging(), requests_max=1, classes=one)


async def _read(call: Any) -> None:
    try:
        await call.read()
    except asyncio.CancelledError:
        return


@pytest.mark.parametrize("how", ["deadline", "gone", "cancel", "shutdown"])
def test_whoever_waits_can_be_ended(directory: Path, how: str) -> None:
    worker = hanging()

    async def test(bench: RouterBench) -> None:
        (call,) = await fill(bench, 1)
        timeout = 0.3 if how == "deadline" else None
        waiting = bench.inference.Generate(Request(text="ab", request_id="r"), timeout=timeout)
        reading = asyncio.create_task(waiting.read())
        await eventually(lambda: standard(bench).waiting == 1)
        if how == "gone":
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
        elif how == "cancel":
            await bench.inference.Cancel(inference_pb2.CancelRequest(request_id="r"))
            reason = (await reading).finish.reason
            assert reason == inference_pb2.FINISH_REASON_CANCELLED
        else:
            if how == "shutdown":
                await bench.router.stop()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await reading
            expected = {"deadline": "DEADLINE_EXCEEDED", "shutdown": "UNAVAILABLE"}
            assert caught.value.code().name == expected[how]
        await eventually(lambda: standard(bench).waiting == 0)
        assert len(worker.requests) == 1
        call.cancel()

    run(directory, test, worker, requests_max=1)


def test_a_limit_out_of_reach_is_told_at_once_with_when_it_is_worth_asking(
    directory: Path,
) -> None:
    worker = hanging()
    worker.load = WorkerLoad(waiting_tokens=300, prefill_tokens_per_s=100.0)

    async def test(bench: RouterBench) -> None:
        (call,) = await fill(bench, 1)
        words, after_ms = await refused(bench)
        assert "the limit is 1 s" in words
        # 300 tokens at 100 a second, and its own two; then its turn among those told.
        assert 1500 <= after_ms <= 4500
        assert standard(bench).refused[RefusalReason.TTFT_LIMIT] == 1
        worker.load = WorkerLoad(prefill_tokens_per_s=100.0)
        view = bench.router.fleet.view
        await eventually(lambda: view(()).decode.loads.prefill_tokens[0] < 100)
        worker.script = lambda _: Script()
        assert text_of(await bench.ask("ab")) == "ab"
        call.cancel()

    limit = ServiceClassesConfig(standard=ServiceClassConfig(ttft_limit_s=1.0))
    run(directory, test, worker, classes=limit)


def test_a_limit_that_goes_out_of_reach_ends_the_wait(directory: Path) -> None:
    async def test(bench: RouterBench) -> None:
        (call,) = await fill(bench, 1)
        words, after_ms = await asyncio.wait_for(refused(bench), 60)
        assert "the limit is 0.3 s" in words
        assert after_ms >= 100
        call.cancel()

    limit = ServiceClassesConfig(standard=ServiceClassConfig(ttft_limit_s=0.3))
    run(directory, test, hanging(), requests_max=1, classes=limit)


def test_what_a_tenant_may_use_is_its_own(directory: Path) -> None:
    async def test(bench: RouterBench) -> None:
        calls = await fill(bench, 2, tenant="a")
        words, _ = await refused(bench, tenant="a")
        assert words.startswith("the tenant has 2 requests in flight already")
        calls += await fill(bench, 1, tenant="b")
        assert standard(bench).refused[RefusalReason.TENANT_CONCURRENT] == 1
        for call in calls:
            call.cancel()

    run(directory, test, hanging(), tenants=TenantConfig(concurrent_max=2))


def test_allowances_per_minute(directory: Path) -> None:
    worker = FakeWorker("w")

    async def test(bench: RouterBench) -> None:
        await bench.ask("ab", tenant="a", sampling={"max_tokens": 50})
        words, after_ms = await refused(bench, tenant="a", sampling={"max_tokens": 98})
        assert words.startswith("the tenant has used its 100 tokens a minute")
        # Two of the prompt and two of the answer were used, so four are missing of all 100.
        assert 0 < after_ms <= 4 * 600
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await bench.ask("ab", tenant="a", sampling={"max_tokens": 99})
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (caught.value.details() or "").startswith("sampling.max_tokens: prompt and answers")
        words, after_ms = await refused(bench, tenant="a")
        assert words.startswith("the tenant has used its 3 requests a minute")
        assert 1000 < after_ms <= 20_000
        assert text_of(await bench.ask("ab", tenant="b", sampling={"max_tokens": 9})) == "ab"

    limits = TenantConfig(requests_per_minute=3.0, tokens_per_minute=100.0)
    run(directory, test, worker, tenants=limits)


def test_a_long_tenant_name_is_named(directory: Path) -> None:
    async def test(bench: RouterBench) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await bench.ask("ab", tenant="t" * 129)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (caught.value.details() or "").startswith("tenant: has 129 characters")

    run(directory, test, FakeWorker("w"))


def test_a_modest_tenant_overtakes_the_queue_of_another(directory: Path) -> None:
    worker = hanging()

    async def test(bench: RouterBench) -> None:
        (call,) = await fill(bench, 1, tenant="flood")
        flood = [asyncio.create_task(bench.ask("flood", tenant="flood")) for _ in range(6)]
        await eventually(lambda: standard(bench).waiting == 6)
        modest = asyncio.create_task(bench.ask("modest", tenant="modest"))
        await eventually(lambda: standard(bench).waiting == 7)
        worker.script = lambda _: Script()
        call.cancel()
        await asyncio.gather(modest, *flood)
        lengths = [int(request.prompt.size) for request in worker.requests[1:3]]
        assert len("modest") in lengths

    run(directory, test, worker, requests_max=1)


def test_with_no_worker_nobody_waits_to_hear_it(directory: Path) -> None:
    async def test(bench: RouterBench) -> None:
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await bench.ask("ab")
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    run(directory, test)


def test_storms_of_clients_that_come_and_go_leave_nothing(directory: Path) -> None:
    """Cancelled at every moment: before places, between grant and first use, while running."""
    worker = hanging()

    async def test(bench: RouterBench) -> None:
        for turns in range(40):
            calls = [
                bench.inference.Generate(Request(text="ab", tenant=f"t{number % 3}"))
                for number in range(4)
            ]
            for _ in range(turns):
                await asyncio.sleep(0)
            for call in calls:
                call.cancel()
        await eventually(lambda: bench.router.requests_in_flight == 0)
        worker.script = lambda _: Script()
        assert text_of(await bench.ask("ab")) == "ab"

    run(directory, test, worker, requests_max=2)
