"""The port for the smg gateway beside front doors that ask for keys and certificates."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from kvferry.errors import ConfigError
from kvferry.router_config import SecurityConfig, SmgConfig
from kvferry.rpc.v1 import inference_pb2, inference_pb2_grpc
from router.api.smg_server import serve_smg
from tests.support.certificates import Authority
from tests.support.fake_worker import FakeWorker, Script
from tests.support.ports import free_port
from tests.support.router_bench import SERVED, RouterBench, eventually, router_bench

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path


@pytest.fixture
def security(tmp_path: Path) -> SecurityConfig:
    authority = Authority(tmp_path, "ca")
    server, keys = authority.identity("server"), tmp_path / "keys"
    keys.write_text("blue: the-key-of-blue-0001\n")
    return SecurityConfig(
        str(server.certificate), str(server.key), str(authority.file), api_keys=str(keys)
    )


def run(
    directory: Path,
    security: SecurityConfig,
    test: Callable[[RouterBench, Any], Awaitable[None]],
    script: Script,
) -> None:
    """`test` gets a channel to the gateway's port."""
    worker = FakeWorker("w", script=lambda _: script)

    async def main() -> None:
        async with (
            asyncio.timeout(60),
            router_bench(directory, worker, security=security) as bench,
        ):
            config = SmgConfig(port=free_port(), tenant="gate")
            door = await serve_smg(bench.doors, config)
            assert door is not None
            async with grpc.aio.insecure_channel(f"127.0.0.1:{config.port}") as channel:
                await test(bench, channel)
            await door.stop(1.0)

    asyncio.run(main())


def asking(request_id: str = "") -> Any:
    return vllm_engine_pb2.GenerateRequest(request_id=request_id, text="hello", stream=True)


def test_a_gateway_without_keys_is_served_on_its_own_account(
    directory: Path, security: SecurityConfig
) -> None:
    async def test(bench: RouterBench, channel: Any) -> None:
        tenants = []
        real = bench.router.generate

        def noted(request: Any) -> Any:
            tenants.append(request.tenant)
            return real(request)

        bench.router.generate = noted  # type: ignore[method-assign]
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        info = await stub.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest())
        assert info.served_model_name == SERVED
        *_, last = [answer async for answer in stub.Generate(asking())]
        assert last.complete.finish_reason == "stop"
        assert tenants == ["gate"]
        with pytest.raises(grpc.aio.AioRpcError, match=r"tenant: is 'blue'; .* 'gate'"):
            await stub.Generate(asking(), metadata=(("x-kvferry-tenant", "blue"),)).read()

    run(directory, security, test, Script())


def test_nothing_else_is_served_there(directory: Path, security: SecurityConfig) -> None:
    async def test(bench: RouterBench, channel: Any) -> None:
        calls = (
            inference_pb2_grpc.InferenceStub(channel).ModelInfo(inference_pb2.ModelInfoRequest()),
            inference_pb2_grpc.AdminStub(channel).ClusterStatus(
                inference_pb2.ClusterStatusRequest()
            ),
        )
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    run(directory, security, test, Script())


def test_a_gateway_ends_its_own_requests_only(directory: Path, security: SecurityConfig) -> None:
    async def test(bench: RouterBench, channel: Any) -> None:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        call = stub.Generate(asking("mine"))
        await call.read()
        bench.router._in_flight["theirs"] = bench.router._in_flight["mine"].__class__(9.0, "blue")
        await stub.Abort(vllm_engine_pb2.AbortRequest(request_ids=["theirs", "mine"]))
        assert (await call.read()).complete.finish_reason == "abort"
        bench.router._in_flight.pop("theirs").raise_if_ended()
        await eventually(lambda: bench.router.requests_in_flight == 0)

    run(directory, security, test, Script(hang_after=1))


def test_there_is_no_port_unless_one_is_set_and_free(directory: Path) -> None:
    async def main() -> None:
        async with router_bench(directory) as bench:
            assert await serve_smg(bench.doors, SmgConfig()) is None
            with socket.socket() as taken:
                taken.bind(("127.0.0.1", 0))
                taken.listen()
                port = taken.getsockname()[1]
                with pytest.raises(ConfigError, match=f"router.smg.port: cannot bind .*:{port}"):
                    await serve_smg(bench.doors, SmgConfig(port=port))

    asyncio.run(main())
