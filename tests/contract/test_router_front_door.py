"""The front door over real gRPC, with workers that follow a script."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from kvferry.accounts import HostAccounts, WorkerLoad
from kvferry.cache_key import CacheUse, Sharing
from kvferry.errors import ConfigError
from kvferry.generation import AttemptUsage, FinishReason
from kvferry.limits import CLIENT_MESSAGE_BYTES_MAX
from kvferry.membership import Role
from kvferry.router_config import ServiceClassConfig, ServiceClassesConfig
from kvferry.rpc.v1 import inference_pb2
from router.api.grpc_server import serve
from tests.support.fake_worker import FakeWorker, Script
from tests.support.router_bench import SERVED, RouterBench, eventually, router_bench, text_of
from tests.support.router_model import (
    EOS_ID,
    VOCAB_SIZE,
    byte_tokenizer,
    extra_key,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

Request = inference_pb2.GenerateRequest


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


def ids_of(text: str) -> list[int]:
    ids: list[int] = byte_tokenizer().encode(text).ids
    return ids


async def code_of(call: Any) -> tuple[grpc.StatusCode, str]:
    """How a call that must fail ends; one with a stream is read to its end."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (_drain(call) if hasattr(call, "__aiter__") else call)
    return caught.value.code(), caught.value.details() or ""


async def _drain(call: Any) -> None:
    async for _ in call:
        pass


def test_text_in_text_out(directory: Path) -> None:
    usage = AttemptUsage(1, 2, 3, 4, 5.0)
    worker = FakeWorker("w", script=lambda _: Script(usage=usage))

    async def test(bench: RouterBench) -> None:
        responses = await bench.ask("héllo 🚢", request_id="mine")
        assert text_of(responses) == "héllo 🚢"
        assert [id_ for each in responses for id_ in each.token_ids] == ids_of("héllo 🚢")
        assert {each.request_id for each in responses} == {"mine"}
        finish = responses[-1].finish
        assert finish.reason == inference_pb2.FINISH_REASON_STOP
        figures = finish.usage
        assert (figures.prompt_tokens, figures.completion_tokens, figures.attempt) == (11, 11, 1)
        assert (figures.decode_worker, figures.prefill_worker) == ("w", "")
        assert (figures.moved_tokens, figures.moved_bytes, figures.handoff_ms) == (3, 4, 5.0)
        assert figures.ttft_ms > 0
        assert figures.itl_ms > 0

    run(directory, test, worker)


def test_token_ids_and_conversations(directory: Path) -> None:
    worker = FakeWorker("w")

    async def test(bench: RouterBench) -> None:
        call = bench.inference.Generate(Request(token_ids={"ids": ids_of("abc")}))
        assert text_of([each async for each in call]) == "abc"
        turns = [{"role": "user", "content": "hi"}]
        call = bench.inference.Generate(Request(chat={"messages": turns}))
        assert text_of([each async for each in call]) == "user: hiassistant: "
        assert worker.requests[-1].prompt.tolist().count(EOS_ID) == 1

    run(directory, test, worker)


def test_how_a_request_shares_its_kv_reaches_the_worker(directory: Path) -> None:
    worker = FakeWorker("w")

    async def test(bench: RouterBench) -> None:
        await bench.ask("abc")
        await bench.ask("abc", sharing=inference_pb2.SHARING_RECOMPUTED, priority=7)
        await bench.ask("abc", sharing=inference_pb2.SHARING_PRIVATE, priority=-100)
        key = extra_key()
        assert [request.cache_use for request in worker.requests] == [
            CacheUse(key, Sharing.SHARED, 0),
            CacheUse(key, Sharing.RECOMPUTED, 7),
            CacheUse(key, Sharing.PRIVATE, -100),
        ]

    run(directory, test, worker)


def test_other_weights_share_nothing_whatever_they_are_called(directory: Path) -> None:
    keys = []

    async def test(bench: RouterBench) -> None:
        await bench.ask("abc")

    for theta in (10_000, 100_000, 100_000):
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {"rope_theta": theta}))
        worker = FakeWorker("w")
        run(directory, test, worker)
        keys.append(worker.requests[0].cache_use.extra_key)
    assert keys[0] != keys[1] == keys[2]


def test_a_pair_is_named_in_the_call_and_in_the_usage(directory: Path) -> None:
    prefill, decode = FakeWorker("p", Role.PREFILL), FakeWorker("d", Role.DECODE)

    async def test(bench: RouterBench) -> None:
        responses = await bench.ask("abc", cache_salt="tenant")
        usage = responses[-1].finish.usage
        assert (usage.prefill_worker, usage.decode_worker) == ("p", "d")
        (attempt,) = decode.requests
        assert attempt.source is not None
        assert attempt.source.address == prefill.info.address
        assert attempt.source.incarnation == prefill.incarnation
        assert attempt.cache_use == CacheUse(extra_key("tenant"))
        assert not prefill.requests

    run(directory, test, prefill, decode)


def test_sampling_is_complete_when_it_reaches_a_worker(directory: Path) -> None:
    worker = FakeWorker("w")

    async def test(bench: RouterBench) -> None:
        await bench.ask("a", sampling={"temperature": 0.0, "max_tokens": 100_000})
        await bench.ask("a", sampling={"seed": 5})
        first, second = (each.sampling for each in worker.requests)
        assert (first.temperature, first.max_tokens) == (0.0, 511)
        assert first.seed != 0
        assert (second.seed, second.max_tokens) == (5, 128)

    run(directory, test, worker)


def test_a_stop_string_ends_the_stream_and_the_worker(directory: Path) -> None:
    script = Script(
        tuple(ids_of("one END")), hang_after=7, early_usage=AttemptUsage(decode_hit_tokens=1)
    )
    worker = FakeWorker("w", script=lambda _: script)

    async def test(bench: RouterBench) -> None:
        responses = await bench.ask("x", sampling={"stop": ["END"]}, request_id="r")
        assert text_of(responses) == "one "
        assert sum(len(response.token_ids) for response in responses) == 7
        assert responses[-1].finish.stop_string == "END"
        assert responses[-1].finish.usage.decode_hit_tokens == 1
        await eventually(lambda: worker.cancelled == [worker.requests[0].id])

    run(directory, test, worker)


def test_cancel_by_id(directory: Path) -> None:
    worker = FakeWorker("w", script=lambda _: Script(hang_after=2))

    async def test(bench: RouterBench) -> None:
        call = bench.inference.Generate(Request(text="abc", request_id="r1"))
        await call.read()
        for other in ("r", "r10", ""):
            answer = await bench.inference.Cancel(inference_pb2.CancelRequest(request_id=other))
            assert not answer.found
        answer = await bench.inference.Cancel(inference_pb2.CancelRequest(request_id="r1"))
        assert answer.found
        await call.read()
        last = await call.read()
        assert await call.read() is grpc.aio.EOF
        assert last.finish.reason == inference_pb2.FINISH_REASON_CANCELLED
        assert last.finish.usage.completion_tokens == 2
        await eventually(lambda: worker.cancelled == [worker.requests[0].id])
        assert bench.router.requests_in_flight == 0

    run(directory, test, worker)


@pytest.mark.parametrize("sent", [0, 1])
def test_a_client_that_goes_away_ends_its_request(directory: Path, sent: int) -> None:
    worker = FakeWorker("w", script=lambda _: Script(hang_after=sent))

    async def test(bench: RouterBench) -> None:
        call = bench.inference.Generate(Request(text="abc", request_id="r"))
        await eventually(lambda: bool(worker.requests))
        call.cancel()
        await eventually(lambda: worker.cancelled == [worker.requests[0].id])
        await eventually(lambda: bench.router.requests_in_flight == 0)

    run(directory, test, worker)


def test_deadlines_of_client_and_router(directory: Path) -> None:
    worker = FakeWorker("w", script=lambda _: Script(hang_after=1))

    async def test(bench: RouterBench) -> None:
        code, _ = await code_of(bench.inference.Generate(Request(text="abc"), timeout=0.3))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        await eventually(lambda: bench.router.requests_in_flight == 0)
        code, details = await code_of(bench.inference.Generate(Request(text="abc")))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "0.6 s" in details
        # On a slow machine the first may end before the worker has heard of it.
        await eventually(lambda: len(worker.cancelled) == len(worker.requests) > 0)

    run(directory, test, worker, request_timeout_s=0.6)


def test_a_client_that_does_not_read_holds_nothing_for_ever(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.api.bounded_answer._WRITE_GRACE_S", 0.0)
    worker = FakeWorker("w", script=lambda _: Script((65,) * 20_000))

    async def test(bench: RouterBench) -> None:
        call = bench.inference.Generate(Request(text="abc"))
        await eventually(lambda: bench.router.requests_in_flight == 1)
        await eventually(lambda: bench.router.requests_in_flight == 0)
        await eventually(lambda: len(worker.cancelled) == 1)
        call.cancel()

    run(directory, test, worker, request_timeout_s=0.4)


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (Request(), "INVALID_ARGUMENT", "input: is missing"),
        (Request(text=""), "INVALID_ARGUMENT", "text: must not be empty"),
        (Request(text="x" * 512), "INVALID_ARGUMENT", "text: has 512 tokens"),
        (Request(text="x" * 20_000), "INVALID_ARGUMENT", "text: has 20000 tokens"),
        (Request(text="x", model="gpt"), "NOT_FOUND", "model: 'gpt'"),
        (Request(text="x", sampling={"top_p": 2}), "INVALID_ARGUMENT", "sampling.top_p"),
        (Request(text="x", sampling={"temperature": -1}), "INVALID_ARGUMENT", "sampling.temp"),
        (Request(text="x", sampling={"stop": ["s"] * 10_000}), "INVALID_ARGUMENT", "sampling.stop"),
        (Request(token_ids={"ids": [2**32 - 1]}), "INVALID_ARGUMENT", "token_ids"),
        (Request(token_ids={"ids": [VOCAB_SIZE]}), "INVALID_ARGUMENT", "token_ids[0]"),
        (Request(chat={}), "INVALID_ARGUMENT", "chat.messages"),
        (
            Request(text="x", sharing=7),
            "INVALID_ARGUMENT",
            "sharing: is 7; must be one of SHARING_",
        ),
        (Request(text="x", priority=101), "INVALID_ARGUMENT", "priority: is 101"),
        (Request(text="x", cache_salt="s" * 257), "INVALID_ARGUMENT", "cache_salt: has 257"),
    ],
)
def test_bad_input_is_named_and_hurts_nobody(
    directory: Path, request_: Any, code: str, words: str
) -> None:
    worker = FakeWorker("w")

    async def test(bench: RouterBench) -> None:
        got, details = await code_of(bench.inference.Generate(request_))
        assert got.name == code
        assert words in details
        assert not worker.requests
        assert text_of(await bench.ask("ok", model=SERVED)) == "ok"
        assert bench.router.requests_in_flight == 0

    run(directory, test, worker)


def test_bytes_that_are_not_utf8_name_the_field(directory: Path) -> None:
    async def test(bench: RouterBench) -> None:
        for method, kind in (("Generate", "stream"), ("Cancel", "unary")):
            path = f"/kvferry.rpc.v1.Inference/{method}"
            make = bench.channel.unary_stream if kind == "stream" else bench.channel.unary_unary
            code, details = await code_of(make(path)(b"\x0a\x02\xff\xfe"))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert details == "request_id: is not valid UTF-8"

    run(directory, test, FakeWorker("w"))


def test_a_message_that_is_too_large_is_refused(directory: Path) -> None:
    async def test(bench: RouterBench) -> None:
        huge = Request(text="x" * (CLIENT_MESSAGE_BYTES_MAX + 1))
        code, details = await code_of(bench.inference.Generate(huge))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert str(CLIENT_MESSAGE_BYTES_MAX) in details
        assert text_of(await bench.ask("ok")) == "ok"

    run(directory, test, FakeWorker("w"))


def test_requests_beyond_the_limit_are_refused_with_a_hint(directory: Path) -> None:
    worker = FakeWorker("w", script=lambda _: Script(hang_after=1))

    async def test(bench: RouterBench) -> None:
        calls = [bench.inference.Generate(Request(text="ab")) for _ in range(2)]
        for call in calls:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await bench.ask("ab")
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        hints = dict(caught.value.trailing_metadata() or ())
        # Two places, each held for a second as far as is known; half of them are promised.
        assert int(hints["grpc-retry-pushback-ms"]) == 1000
        for call in calls:
            call.cancel()
        await eventually(lambda: bench.router.requests_in_flight == 0)

    nobody_waits = ServiceClassesConfig(standard=ServiceClassConfig(queue_max=0))
    run(directory, test, worker, requests_max=2, classes=nobody_waits)


def test_an_id_in_flight_is_refused_and_may_be_used_again(directory: Path) -> None:
    worker = FakeWorker("w", script=lambda _: Script(hang_after=1))

    async def test(bench: RouterBench) -> None:
        call = bench.inference.Generate(Request(text="ab", request_id="r"))
        await call.read()
        again = bench.inference.Generate(Request(text="ab", request_id="r"))
        code, details = await code_of(again)
        assert code is grpc.StatusCode.ALREADY_EXISTS
        assert "request_id: 'r'" in details
        call.cancel()
        await eventually(lambda: bench.router.requests_in_flight == 0)
        worker.script = lambda _: Script()
        assert text_of(await bench.ask("ab", request_id="r")) == "ab"
        # Workers remember what has ended: to them each request must be another one.
        assert len({request.id for request in worker.requests}) == len(worker.requests) == 2

    run(directory, test, worker)


def test_logprobs_come_back(directory: Path) -> None:
    worker = FakeWorker("w", script=lambda _: Script(logprob=-0.5))

    async def test(bench: RouterBench) -> None:
        responses = await bench.ask("a", sampling={"logprobs": 1})
        (entry,) = responses[0].logprobs
        assert (entry.chosen.token_id, entry.chosen.logprob) == (ids_of("a")[0], -0.5)
        assert worker.requests[0].sampling.logprobs == 1

    run(directory, test, worker)


def test_model_info(directory: Path) -> None:
    async def test(bench: RouterBench) -> None:
        info = await bench.inference.ModelInfo(inference_pb2.ModelInfoRequest())
        assert info == inference_pb2.ModelInfoResponse(
            model=SERVED,
            vocab_size=VOCAB_SIZE,
            context_length=512,
            eos_token_ids=[EOS_ID],
            page_size=4,
            dtype="float32",
            chat_template=True,
        )

    run(directory, test)


def test_cluster_status(directory: Path) -> None:
    prefill = FakeWorker("p", Role.PREFILL, load=WorkerLoad(waiting=3), counters={"steps": 5})
    prefill.host_accounts = HostAccounts(1, 2, 3, 4, 5, 15)
    decode = FakeWorker("d", Role.DECODE, status_fails=True)

    async def test(bench: RouterBench) -> None:
        status = await bench.admin.ClusterStatus(inference_pb2.ClusterStatusRequest())
        assert status.membership_version == 1
        assert [each.worker_id for each in status.workers] == ["d", "p"]
        silent, known = status.workers
        assert (silent.reachable, silent.HasField("load"), silent.role) == (False, False, "decode")
        assert (known.reachable, known.load.waiting, known.pid) == (True, 3, 4711)
        assert (known.incarnation, known.accounts.total) == (prefill.incarnation, 10_000)
        assert dict(known.counters) == {"steps": 5}
        assert (known.host_accounts.writing, known.host_accounts.total) == (4, 15)
        assert not silent.HasField("host_accounts")

    run(directory, test, prefill, decode)


def test_an_audit_asks_every_worker_and_names_those_that_cannot_be_asked(directory: Path) -> None:
    prefill = FakeWorker("p", Role.PREFILL, violations=("check 8: accounts do not add up",))
    decode = FakeWorker("d", Role.DECODE)
    silent = FakeWorker("s", Role.DECODE, audit_fails=True)

    async def test(bench: RouterBench) -> None:
        answer = await bench.admin.Audit(inference_pb2.AuditRequest())
        good, bad, lost = answer.audits
        assert (good.worker_id, list(good.report.violations)) == ("d", [])
        assert (good.report.accounts.total, good.report.engine_steps) == (10_000, 42)
        assert (bad.worker_id, list(bad.report.violations)) == ("p", list(prefill.violations))
        assert (lost.worker_id, lost.HasField("report")) == ("s", False)
        assert lost.failure == "worker s: scripted"

    run(directory, test, prefill, decode, silent)


def test_an_audit_of_one_worker_asks_no_other(directory: Path) -> None:
    async def test(bench: RouterBench) -> None:
        answer = await bench.admin.Audit(inference_pb2.AuditRequest(worker_id="d"))
        assert [each.worker_id for each in answer.audits] == ["d"]
        code, details = await code_of(bench.admin.Audit(inference_pb2.AuditRequest(worker_id="e")))
        assert code is grpc.StatusCode.NOT_FOUND
        assert details == "worker_id: 'e' is not in this cluster; its workers are d, p"

    run(directory, test, FakeWorker("p", Role.PREFILL), FakeWorker("d", Role.DECODE))


def test_health_follows_the_workers(directory: Path) -> None:
    decode = FakeWorker("d", Role.DECODE)

    async def test(bench: RouterBench) -> None:
        stub = health_pb2_grpc.HealthStub(bench.channel)
        statuses = health_pb2.HealthCheckResponse
        service = "kvferry.rpc.v1.Inference"
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=service))
        assert (await watch.read()).status == statuses.SERVING
        decode.status_fails = True
        assert (await watch.read()).status == statuses.NOT_SERVING
        decode.status_fails = False
        assert (await watch.read()).status == statuses.SERVING
        await bench.members()
        assert (await watch.read()).status == statuses.NOT_SERVING
        overall = await stub.Check(health_pb2.HealthCheckRequest())
        assert overall.status == statuses.NOT_SERVING
        watch.cancel()

    run(directory, test, decode, FakeWorker("p", Role.PREFILL))


def test_a_client_can_be_built_from_reflection_alone(directory: Path) -> None:
    async def test(bench: RouterBench) -> None:
        def names(target: str) -> tuple[set[str], str]:
            with grpc.insecure_channel(target) as channel:
                database = ProtoReflectionDescriptorDatabase(channel)
                file = database.FindFileContainingSymbol("kvferry.rpc.v1.Inference")
                return set(database.get_services()), file.name

        target = bench.channel_target
        services, file = await asyncio.to_thread(names, target)
        assert {"kvferry.rpc.v1.Inference", "kvferry.rpc.v1.Admin"} <= services
        assert "grpc.health.v1.Health" in services
        assert file == "kvferry/rpc/v1/inference.proto"

    run(directory, test)


def test_a_port_in_use_names_the_setting(directory: Path) -> None:
    async def test(bench: RouterBench) -> None:
        port = int(bench.channel_target.rpartition(":")[2])
        with pytest.raises(ConfigError, match=r"^router\.port"):
            await serve(bench.doors, ("127.0.0.1", port))

    run(directory, test)


def test_length_is_told(directory: Path) -> None:
    worker = FakeWorker("w", script=lambda _: Script(reason=FinishReason.LENGTH))

    async def test(bench: RouterBench) -> None:
        responses = await bench.ask("abc")
        assert responses[-1].finish.reason == inference_pb2.FINISH_REASON_LENGTH

    run(directory, test, worker)
