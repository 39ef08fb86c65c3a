"""Connections and keys at the gRPC front door, with certificates made for the test."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from cluster.client import CallFailed, Client
from cluster.client_security import ClientSecurity
from kvferry.router_config import SecurityConfig
from kvferry.rpc.v1 import inference_pb2, inference_pb2_grpc
from tests.support.certificates import Authority
from tests.support.fake_worker import FakeWorker, Script
from tests.support.router_bench import SERVED, RouterBench, router_bench, text_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from tests.support.certificates import Identity

BLUE, OPERATOR = "the-key-of-blue-0001", "the-operators-key-01"
HELLO = inference_pb2.GenerateRequest(text="hello")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ca")


def run(
    directory: Path,
    security: SecurityConfig,
    test: Callable[[RouterBench], Awaitable[None]],
    worker: FakeWorker | None = None,
) -> None:
    serving = worker or FakeWorker("w")

    async def main() -> None:
        async with (
            asyncio.timeout(60),
            router_bench(directory, serving, security=security) as bench,
        ):
            await test(bench)

    asyncio.run(main())


def secure_channel(bench: RouterBench, ca: Path, client: Identity | None = None) -> Any:
    credentials = grpc.ssl_channel_credentials(
        ca.read_bytes(),
        None if client is None else client.key_bytes(),
        None if client is None else client.certificate_bytes(),
    )
    return grpc.aio.secure_channel(bench.channel_target, credentials)


async def answer_of(channel: Any, metadata: Any = ()) -> str:
    call = inference_pb2_grpc.InferenceStub(channel).Generate(HELLO, metadata=metadata, timeout=60)
    return text_of([response async for response in call])


async def code_of(answer: Awaitable[Any]) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer
    code: grpc.StatusCode = caught.value.code()
    return code


def tls(server: Identity, client_ca: Path | None = None) -> SecurityConfig:
    return SecurityConfig(
        tls_certificate=str(server.certificate),
        tls_key=str(server.key),
        tls_client_ca="" if client_ca is None else str(client_ca),
    )


def test_tls(directory: Path, authority: Authority, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "stranger")

    async def test(bench: RouterBench) -> None:
        async with secure_channel(bench, authority.file) as channel:
            assert await answer_of(channel) == "hello"
        async with secure_channel(bench, stranger.file) as channel:
            assert await code_of(answer_of(channel)) is grpc.StatusCode.UNAVAILABLE
        async with grpc.aio.insecure_channel(bench.channel_target) as channel:
            assert await code_of(answer_of(channel)) is grpc.StatusCode.UNAVAILABLE

    run(directory, tls(authority.identity("server")), test)


def test_clients_show_certificates(directory: Path, authority: Authority, tmp_path: Path) -> None:
    clients, strangers = Authority(tmp_path, "clients"), Authority(tmp_path, "strangers")

    async def test(bench: RouterBench) -> None:
        async with secure_channel(bench, authority.file, clients.identity("good")) as channel:
            assert await answer_of(channel) == "hello"
        for wrong in (None, strangers.identity("bad"), authority.identity("other")):
            async with secure_channel(bench, authority.file, wrong) as channel:
                assert await code_of(answer_of(channel)) is grpc.StatusCode.UNAVAILABLE

    run(directory, tls(authority.identity("server"), clients.file), test)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(f"blue: {BLUE}\nadmin: {OPERATOR}\n")
    return file


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


def test_every_service_but_health_asks_for_a_key(directory: Path, keys: Path) -> None:
    async def test(bench: RouterBench) -> None:
        smg = vllm_engine_pb2_grpc.VllmEngineStub(bench.channel)
        info = inference_pb2.ModelInfoRequest()
        calls = (
            lambda metadata: answer_of(bench.channel, metadata),
            lambda metadata: bench.inference.ModelInfo(info, metadata=metadata),
            lambda metadata: bench.admin.Audit(inference_pb2.AuditRequest(), metadata=metadata),
            lambda metadata: smg.GetModelInfo(
                vllm_engine_pb2.GetModelInfoRequest(), metadata=metadata
            ),
            lambda metadata: bench.channel.stream_stream(
                "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
            )(iter([b""]), metadata=metadata).read(),
            lambda metadata: bench.channel.unary_unary("/no.such/Call")(b"", metadata=metadata),
        )
        for call in calls:
            for metadata in ((), bearer("wrong-key-wrong-key"), (("x-api-key", ""),)):
                assert await code_of(call(metadata)) is grpc.StatusCode.UNAUTHENTICATED
        assert await answer_of(bench.channel, bearer(BLUE)) == "hello"
        assert await answer_of(bench.channel, (("x-api-key", BLUE),)) == "hello"
        served = await smg.GetModelInfo(
            vllm_engine_pb2.GetModelInfoRequest(), metadata=bearer(BLUE)
        )
        assert served.served_model_name == SERVED
        health = health_pb2_grpc.HealthStub(bench.channel)
        told = await health.Check(health_pb2.HealthCheckRequest())
        assert told.status == health_pb2.HealthCheckResponse.SERVING

    run(directory, SecurityConfig(api_keys=str(keys)), test)


def test_only_the_operator_administers(directory: Path, keys: Path) -> None:
    async def test(bench: RouterBench) -> None:
        asked = inference_pb2.ClusterStatusRequest()
        status = bench.admin.ClusterStatus(asked, metadata=bearer(BLUE))
        assert await code_of(status) is grpc.StatusCode.PERMISSION_DENIED
        told = await bench.admin.ClusterStatus(asked, metadata=bearer(OPERATOR))
        assert [worker.worker_id for worker in told.workers] == ["w"]

    run(directory, SecurityConfig(api_keys=str(keys)), test)


def test_a_key_taken_out_of_the_file_works_no_more(directory: Path, keys: Path) -> None:
    async def test(bench: RouterBench) -> None:
        async def is_known() -> bool:
            asked = inference_pb2.ModelInfoRequest()
            try:
                await bench.inference.ModelInfo(asked, metadata=bearer(BLUE))
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
                    raise
                return False
            return True

        assert await is_known()
        await asyncio.to_thread(keys.write_text, f"admin: {OPERATOR}\n")
        async with asyncio.timeout(60):
            while await is_known():
                pass

    run(directory, SecurityConfig(api_keys=str(keys)), test)


def test_the_account_is_that_of_the_key(directory: Path, keys: Path) -> None:
    async def test(bench: RouterBench) -> None:
        tenants = []
        real = bench.router.generate

        def noted(request: Any) -> Any:
            tenants.append(request.tenant)
            return real(request)

        bench.router.generate = noted  # type: ignore[method-assign]
        await answer_of(bench.channel, bearer(BLUE))
        stub = bench.inference
        named = inference_pb2.GenerateRequest(text="hello", tenant="blue")
        _ = [each async for each in stub.Generate(named, metadata=bearer(BLUE))]
        smg = vllm_engine_pb2_grpc.VllmEngineStub(bench.channel)
        asked = vllm_engine_pb2.GenerateRequest(text="hello")
        _ = [each async for each in smg.Generate(asked, metadata=bearer(BLUE))]
        assert tenants == 3 * ["blue"]
        foreign = inference_pb2.GenerateRequest(text="hello", tenant="red")
        red = (*bearer(BLUE), ("x-kvferry-tenant", "red"))
        for call in (
            stub.Generate(foreign, metadata=bearer(BLUE)),
            stub.Generate(HELLO, metadata=red),
            smg.Generate(asked, metadata=red),
        ):
            assert await code_of(call.read()) is grpc.StatusCode.INVALID_ARGUMENT
        assert tenants == 3 * ["blue"]

    run(directory, SecurityConfig(api_keys=str(keys)), test)


def test_without_keys_the_account_is_the_one_that_is_named(directory: Path) -> None:
    async def test(bench: RouterBench) -> None:
        tenants = []
        real = bench.router.generate

        def noted(request: Any) -> Any:
            tenants.append(request.tenant)
            return real(request)

        bench.router.generate = noted  # type: ignore[method-assign]
        red = (("x-kvferry-tenant", "red"),)
        await answer_of(bench.channel, red)
        named = inference_pb2.GenerateRequest(text="hello", tenant="red")
        _ = [each async for each in bench.inference.Generate(named)]
        smg = vllm_engine_pb2_grpc.VllmEngineStub(bench.channel)
        asked = vllm_engine_pb2.GenerateRequest(text="hello")
        _ = [each async for each in smg.Generate(asked, metadata=red)]
        assert tenants == 3 * ["red"]
        named.tenant = "blue"
        call = bench.inference.Generate(named, metadata=red)
        assert await code_of(call.read()) is grpc.StatusCode.INVALID_ARGUMENT

    run(directory, SecurityConfig(), test)


def test_nobody_ends_the_requests_of_others(directory: Path, keys: Path) -> None:
    other = "the-key-of-red-00001"
    keys.write_text(f"blue: {BLUE}\nred: {other}\nadmin: {OPERATOR}\n")

    async def test(bench: RouterBench) -> None:
        smg = vllm_engine_pb2_grpc.VllmEngineStub(bench.channel)
        for ending in (BLUE, OPERATOR):
            request = inference_pb2.GenerateRequest(text="hello", request_id="mine")
            call = bench.inference.Generate(request, metadata=bearer(BLUE))
            assert (await call.read()).request_id == "mine"
            cancel = inference_pb2.CancelRequest(request_id="mine")
            answer = await bench.inference.Cancel(cancel, metadata=bearer(other))
            assert not answer.found
            abort = vllm_engine_pb2.AbortRequest(request_ids=["mine"])
            await smg.Abort(abort, metadata=bearer(other))
            assert bench.router.requests_in_flight == 1
            answer = await bench.inference.Cancel(cancel, metadata=bearer(ending))
            assert answer.found
            last = await call.read()
            assert last.finish.reason == inference_pb2.FINISH_REASON_CANCELLED

    hangs = FakeWorker("w", script=lambda _: Script(hang_after=1))
    run(directory, SecurityConfig(api_keys=str(keys)), test, hangs)


def test_the_command_lines_client(
    directory: Path, authority: Authority, keys: Path, tmp_path: Path
) -> None:
    clients = Authority(tmp_path, "clients")
    server, client = authority.identity("server"), clients.identity("client")
    config = SecurityConfig(str(server.certificate), str(server.key), str(clients.file), str(keys))
    known = ClientSecurity(
        tls_ca=authority.file,
        tls_certificate=client.certificate,
        tls_key=client.key,
        api_key=OPERATOR,
    )

    async def test(bench: RouterBench) -> None:
        def ask(security: ClientSecurity) -> str:
            with Client(bench.channel_target, security=security) as made:
                return made.cluster_status().workers[0].worker_id

        assert await asyncio.to_thread(ask, known) == "w"
        keyless = ClientSecurity(authority.file, client.certificate, client.key)
        with pytest.raises(CallFailed, match="UNAUTHENTICATED: show an API key"):
            await asyncio.to_thread(ask, keyless)
        with pytest.raises(CallFailed, match="no kvferry cluster answers"):
            await asyncio.to_thread(ask, ClientSecurity())

    run(directory, config, test)
