"""What the router does when workers fail, leave, come back, or tell what they hold."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest

from kvferry.accounts import WorkerLoad
from kvferry.errors import DuplicateRequest, InternalError, InvalidInput, Overloaded
from kvferry.ids import new_incarnation
from kvferry.kv_events import (
    AllBlocksCleared,
    BlocksStored,
    event_block_tokens,
    prompt_block_hashes,
)
from kvferry.limits import ATTEMPTS_MAX
from kvferry.membership import Role, WorkerInfo
from kvferry.rpc.v1 import inference_pb2
from router.tokenizer import Tokenizer
from tests.support.fake_worker import FakeWorker, Script
from tests.support.router_bench import RouterBench, eventually, router_bench, text_of
from tests.support.router_model import byte_tokenizer, extra_key

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from kvferry.errors import KvferryError
    from kvferry.kv_events import BlockHash

Request = inference_pb2.GenerateRequest
FAIL_AT_ONCE = Script(fail_after=0)


def run(
    directory: Path,
    test: Callable[[RouterBench], Awaitable[None]],
    *workers: FakeWorker,
    **settings: Any,
) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), router_bench(directory, *workers, **settings) as bench:
            await test(bench)

    asyncio.run(main())


async def error_of(bench: RouterBench, text: str = "hello") -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await bench.ask(text)
    return caught.value


def blocks(text: str) -> tuple[BlockHash, ...]:
    tokens = Tokenizer(byte_tokenizer(), None).encode(text)
    return tuple(prompt_block_hashes(tokens, event_block_tokens(4), extra_key()))


def summary(bench: RouterBench, worker_id: str) -> Any:
    return next(s for s in bench.router.worker_summaries() if s.info.worker_id == worker_id)


def test_a_failure_before_the_first_token_is_tried_elsewhere(directory: Path) -> None:
    bad = FakeWorker("bad", script=lambda _: FAIL_AT_ONCE)
    good = FakeWorker("good")

    async def test(bench: RouterBench) -> None:
        for _ in range(6):
            responses = await bench.ask("hello", request_id="r")
            assert text_of(responses) == "hello"
            assert responses[-1].finish.usage.decode_worker == "good"
        assert bad.requests
        assert {request.id.attempt for request in bad.requests} == {1}
        again = [request for request in good.requests if request.id.attempt == 2]
        assert len(again) == len(bad.requests)

    run(directory, test, bad, good)


def test_a_lone_worker_is_tried_again_a_bounded_number_of_times(directory: Path) -> None:
    worker = FakeWorker("w", script=lambda _: FAIL_AT_ONCE)

    async def test(bench: RouterBench) -> None:
        error = await error_of(bench)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "worker w: scripted failure" in (error.details() or "")
        assert [request.id.attempt for request in worker.requests] == [1, 2, ATTEMPTS_MAX]

    run(directory, test, worker)


def test_the_next_attempt_has_another_source(directory: Path) -> None:
    prefills = [FakeWorker(name, Role.PREFILL) for name in ("p1", "p2")]
    decode = FakeWorker("d", Role.DECODE)
    decode.script = lambda _: FAIL_AT_ONCE if len(decode.requests) == 1 else Script()

    async def test(bench: RouterBench) -> None:
        usage = (await bench.ask())[-1].finish.usage
        assert usage.attempt == 2
        first, second = (request.source for request in decode.requests)
        assert first is not None
        assert second is not None
        assert first.worker_id != second.worker_id == usage.prefill_worker

    run(directory, test, *prefills, decode)


def test_a_dead_source_leaves_the_prompt_to_the_decode_worker(directory: Path) -> None:
    prefill, decode = FakeWorker("p", Role.PREFILL), FakeWorker("d", Role.DECODE)
    decode.script = lambda request: Script() if request.source is None else FAIL_AT_ONCE

    async def test(bench: RouterBench) -> None:
        await prefill.stop()
        usage = (await bench.ask())[-1].finish.usage
        assert (usage.prefill_worker, usage.decode_worker, usage.attempt) == ("", "d", 2)

    run(directory, test, prefill, decode, status_interval_s=5.0)


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (InternalError("a bug"), "INTERNAL"),
        (InvalidInput("sampling", "is odd"), "INVALID_ARGUMENT"),
        (DuplicateRequest("twice"), "INTERNAL"),
    ],
)
def test_what_would_fail_again_is_not_tried_again(
    directory: Path, error: KvferryError, seen: str
) -> None:
    worker = FakeWorker("w", script=lambda _: Script(fail_after=0, fail_with=error))

    async def test(bench: RouterBench) -> None:
        assert (await error_of(bench)).code().name == seen
        assert len(worker.requests) == 1

    run(directory, test, worker)


def test_an_overloaded_worker_passes_its_hint_on(directory: Path) -> None:
    script = Script(fail_after=0, fail_with=Overloaded("the queue is full", 0.25))
    worker = FakeWorker("w", script=lambda _: script)

    async def test(bench: RouterBench) -> None:
        error = await error_of(bench)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(error.trailing_metadata() or ())["grpc-retry-pushback-ms"] == "250"
        assert len(worker.requests) == 1

    run(directory, test, worker)


def test_an_overloaded_worker_sends_a_request_to_another(directory: Path) -> None:
    script = Script(fail_after=0, fail_with=Overloaded("the queue is full", 0.25))
    full = FakeWorker("full", script=lambda _: script)

    async def test(bench: RouterBench) -> None:
        for _ in range(4):
            assert (await bench.ask())[-1].finish.usage.decode_worker == "free"
        assert full.requests

    run(directory, test, full, FakeWorker("free"))


def test_the_reason_survives_when_nobody_is_left_to_try(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.attempts.RESUME_PATIENCE_S", 0.5)
    worker = FakeWorker("w", script=lambda _: FAIL_AT_ONCE)

    async def test(bench: RouterBench) -> None:
        worker.status_fails = True
        details = (await error_of(bench)).details() or ""
        assert "worker w: scripted failure" in details
        assert "no decode worker is reachable" in details

    run(directory, test, worker, status_interval_s=5.0)


def test_without_workers_a_request_is_refused_at_once(directory: Path) -> None:
    async def test(bench: RouterBench) -> None:
        error = await error_of(bench)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert error.details() == "no decode worker is reachable"

    run(directory, test, FakeWorker("p", Role.PREFILL))


def test_the_only_worker_is_used_while_it_is_merely_late(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.worker_monitor.WORKER_STATUS_TIMEOUT_S", 0.2)
    monkeypatch.setattr("router.worker_monitor.WORKER_STATUS_FAILURES_MAX", 1000)
    worker = FakeWorker("w")

    async def test(bench: RouterBench) -> None:
        worker.status_hangs = True
        await eventually(lambda: not summary(bench, "w").is_reachable)
        assert text_of(await bench.ask("late")) == "late"

    run(directory, test, worker)


def test_a_worker_that_came_back_is_another_one(directory: Path) -> None:
    worker = FakeWorker("w", snapshot_events=(BlocksStored(blocks("x" * 32)),))

    async def test(bench: RouterBench) -> None:
        await eventually(lambda: summary(bench, "w").indexed_blocks == 2)
        await worker.stop()
        worker.incarnation = new_incarnation()
        worker.snapshot_events = ()
        await bench.members(await worker.start())
        assert text_of(await bench.ask("again")) == "again"
        assert summary(bench, "w").indexed_blocks == 0

    run(directory, test, worker)


def test_an_older_membership_changes_nothing(directory: Path) -> None:
    async def test(bench: RouterBench) -> None:
        bench.version = -1
        await bench.members()
        assert bench.router.is_ready

    run(directory, test, FakeWorker("w"))


def test_another_process_at_a_workers_address_gets_nothing(directory: Path) -> None:
    worker = FakeWorker("w")

    async def test(bench: RouterBench) -> None:
        info = worker.info
        stale = WorkerInfo(info.worker_id, info.role, new_incarnation(), info.address)
        await bench.members(stale)
        assert (await error_of(bench)).code() is grpc.StatusCode.UNAVAILABLE
        assert not worker.requests

    run(directory, test, worker)


def test_a_change_of_role_keeps_the_streams(directory: Path) -> None:
    moving = FakeWorker("m", Role.DECODE, snapshot_events=(BlocksStored(blocks("x" * 32)),))
    moving.script = lambda _: Script(hang_after=1)

    async def test(bench: RouterBench) -> None:
        call = bench.inference.Generate(Request(text="ab", request_id="r"))
        await call.read()
        info = moving.info
        now_prefill = WorkerInfo(info.worker_id, Role.PREFILL, info.incarnation, info.address)
        await bench.members(now_prefill)
        assert not bench.router.is_ready
        await eventually(lambda: summary(bench, "m").indexed_blocks == 2)
        assert bench.router.cancel("r")
        assert (await call.read()).finish.reason == inference_pb2.FINISH_REASON_CANCELLED

    run(directory, test, moving)


def test_a_request_goes_where_its_prefix_is(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What was sent to a worker counts as held for as long as its events may be on their way.
    monkeypatch.setattr("router.policy._EVENT_DELAY_S", 0.0)
    text = "a shared beginning of forty-eight bytes, and more"
    workers = [FakeWorker(name) for name in ("w1", "w2", "w3")]

    async def test(bench: RouterBench) -> None:
        await eventually(lambda: all(worker.subscriptions for worker in workers))
        workers[1].emit(BlocksStored(blocks(text)))
        await eventually(lambda: summary(bench, "w2").indexed_blocks == 3)
        for _ in range(5):
            assert (await bench.ask(text))[-1].finish.usage.decode_worker == "w2"
        workers[1].emit(AllBlocksCleared())
        workers[2].emit(BlocksStored(blocks(text)))
        await eventually(lambda: summary(bench, "w3").indexed_blocks == 3)
        assert (await bench.ask(text))[-1].finish.usage.decode_worker == "w3"

    run(directory, test, *workers)


@pytest.mark.parametrize(
    "wish",
    [
        {"cache_salt": "tenant"},
        {"sharing": inference_pb2.SHARING_PRIVATE},
        {"sharing": inference_pb2.SHARING_RECOMPUTED},
    ],
    ids=str,
)
def test_a_prefix_that_cannot_be_used_attracts_nobody(
    directory: Path, wish: dict[str, Any]
) -> None:
    text = "a shared beginning of forty-eight bytes, and more"
    # Busier than the other one, by less than the prefix is worth.
    holder = FakeWorker("holder", load=WorkerLoad(waiting_tokens=20))
    other = FakeWorker("other")

    async def test(bench: RouterBench) -> None:
        await eventually(lambda: bool(holder.subscriptions))
        holder.emit(BlocksStored(blocks(text)))
        await eventually(lambda: summary(bench, "holder").indexed_blocks == 3)
        assert (await bench.ask(text))[-1].finish.usage.decode_worker == "holder"
        assert (await bench.ask(text, **wish))[-1].finish.usage.decode_worker == "other"

    run(directory, test, holder, other)


def test_lost_events_are_mended_by_one_snapshot(directory: Path) -> None:
    worker = FakeWorker("w")

    async def test(bench: RouterBench) -> None:
        await eventually(lambda: worker.subscriptions == 1)
        worker.emit(BlocksStored(blocks("x" * 16)))
        await eventually(lambda: summary(bench, "w").indexed_blocks == 1)
        worker.snapshot_events = (BlocksStored(blocks("x" * 48)),)
        worker.emit(BlocksStored(()), skip=1)
        await eventually(lambda: summary(bench, "w").indexed_blocks == 3)
        assert worker.subscriptions == 2

    run(directory, test, worker)


def test_a_burst_spreads_although_nobody_has_reported(directory: Path) -> None:
    workers = [FakeWorker(name, script=lambda _: Script(hang_after=0)) for name in ("w1", "w2")]

    async def test(bench: RouterBench) -> None:
        calls = [bench.inference.Generate(Request(text="ab")) for _ in range(8)]
        await eventually(lambda: sum(len(worker.requests) for worker in workers) == 8)
        assert [len(worker.requests) for worker in workers] == [4, 4]
        for call in calls:
            call.cancel()
        await eventually(lambda: bench.router.requests_in_flight == 0)

    run(directory, test, *workers, status_interval_s=5.0)


def test_stopping_the_router_ends_everything(directory: Path) -> None:
    worker = FakeWorker("w", script=lambda _: Script(hang_after=1))

    async def test(bench: RouterBench) -> None:
        call = bench.inference.Generate(Request(text="ab"))
        await call.read()
        await bench.router.stop()
        with pytest.raises(grpc.aio.AioRpcError, match="shutting down"):
            await call.read()
        assert (await error_of(bench)).code() is grpc.StatusCode.UNAVAILABLE
        await eventually(lambda: bench.router.requests_in_flight == 0)

    run(directory, test, worker)
