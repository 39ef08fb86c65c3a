"""Whether a router takes a worker that drains for done, over real gRPC."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kvferry.accounts import WorkerLoad
from kvferry.ids import WorkerId
from kvferry.membership import Role
from kvferry.rpc.v1 import inference_pb2
from router.draining import has_work_at
from tests.support.fake_worker import FakeWorker, Script
from tests.support.router_bench import RouterBench, eventually, router_bench
from tests.support.router_model import write_model

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

W = WorkerId("w")


def run(
    directory: Path, test: Callable[[RouterBench], Awaitable[None]], *workers: FakeWorker
) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(60),
            router_bench(write_model(directory), *workers, status_interval_s=60.0) as bench,
        ):
            await test(bench)

    asyncio.run(main())


def test_an_attempt_of_this_router_counts_before_the_worker_says_so(tmp_path: Path) -> None:
    worker = FakeWorker("w", script=lambda _: Script(hang_after=1))

    async def test(bench: RouterBench) -> None:
        assert not await has_work_at(bench.router.fleet, W)
        call = bench.inference.Generate(inference_pb2.GenerateRequest(text="hello"))
        await call.read()
        await bench.members(replace(worker.info, is_draining=True))
        assert await has_work_at(bench.router.fleet, W)
        call.cancel()
        await eventually(lambda: bench.router.requests_in_flight == 0)
        assert not await has_work_at(bench.router.fleet, W)

    run(tmp_path, test, worker)


def test_a_prompt_counts_at_the_worker_that_computes_it(tmp_path: Path) -> None:
    prefill = FakeWorker("p", Role.PREFILL)
    decode = FakeWorker("w", Role.DECODE, script=lambda _: Script(hang_after=0))

    async def test(bench: RouterBench) -> None:
        call = bench.inference.Generate(inference_pb2.GenerateRequest(text="hello"))
        await eventually(lambda: bool(decode.requests))
        assert decode.requests[0].source is not None
        for name in ("p", "w"):
            assert await has_work_at(bench.router.fleet, WorkerId(name)), name
        call.cancel()

    run(tmp_path, test, prefill, decode)


@pytest.mark.parametrize("what", ["running", "waiting", "handoffs"])
def test_the_worker_is_asked_now(tmp_path: Path, what: str) -> None:
    worker = FakeWorker("w")

    async def test(bench: RouterBench) -> None:
        assert not await has_work_at(bench.router.fleet, W)
        worker.load = WorkerLoad(**{what: 1})
        assert await has_work_at(bench.router.fleet, W)
        worker.load = WorkerLoad()
        assert not await has_work_at(bench.router.fleet, W)

    run(tmp_path, test, worker)


def test_a_worker_that_does_not_answer_counts_as_busy_and_one_that_left_does_not(
    tmp_path: Path,
) -> None:
    worker = FakeWorker("w")

    async def test(bench: RouterBench) -> None:
        worker.status_fails = True
        assert await has_work_at(bench.router.fleet, W)
        await bench.members()
        assert not await has_work_at(bench.router.fleet, W)

    run(tmp_path, test, worker)
