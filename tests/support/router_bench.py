"""A router with its front door and fake workers, all in one event loop, over real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import grpc.aio

from kvferry.clock import MonotonicClock
from kvferry.config import CacheConfig, ClusterConfig, ModelConfig
from kvferry.membership import Membership, WorkerInfo
from kvferry.router_config import RouterConfig
from kvferry.rpc.v1 import inference_pb2, inference_pb2_grpc
from router.api.door_settings import DoorSettings
from router.api.grpc_server import FrontDoor, serve
from router.api.http_server import HttpFrontDoor, serve_http
from router.api.request_metrics import RequestMetrics
from router.api.security import Security
from router.router import Router
from tests.support.waiting import HANG_GUARD_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from tests.support.fake_worker import FakeWorker

SERVED = "test-model"
CONFIG = ClusterConfig(
    model=ModelConfig(served_name=SERVED, context_length=512),
    cache=CacheConfig(page_size=4),
    router=RouterConfig(
        host="127.0.0.1", requests_max=8, request_timeout_s=50.0, status_interval_s=0.05
    ),
)


@dataclass(eq=False)
class RouterBench:
    """Everything a test of the front door needs."""

    router: Router
    doors: DoorSettings
    front_door: FrontDoor
    channel: Any
    channel_target: str
    http_url: str
    http_door: HttpFrontDoor
    version: int = 1

    @property
    def inference(self) -> Any:
        return inference_pb2_grpc.InferenceStub(self.channel)

    @property
    def admin(self) -> Any:
        return inference_pb2_grpc.AdminStub(self.channel)

    async def members(self, *infos: WorkerInfo) -> None:
        """Publish a new membership."""
        self.version += 1
        await self.router.set_membership(Membership(self.version, infos))

    async def ask(self, text: str = "hello", **fields: Any) -> list[Any]:
        """All responses to one text prompt."""
        request = inference_pb2.GenerateRequest(text=text, **fields)
        return [message async for message in self.inference.Generate(request)]


@contextlib.asynccontextmanager
async def router_bench(
    directory: Path,
    *workers: FakeWorker,
    adapters: dict[str, str] | None = None,
    **router_settings: Any,
) -> AsyncIterator[RouterBench]:
    """Start, and stop everything at the end."""
    config = replace(CONFIG, router=replace(CONFIG.router, **router_settings))
    if adapters is not None:
        config = replace(config, model=replace(config.model, adapters=adapters))
    infos = [await worker.start() for worker in workers]
    router = Router(config, directory, MonotonicClock(), random.Random(7))
    await router.start()
    security = Security(config.router.security, reload_interval_s=0.02)
    security.start()
    metrics = RequestMetrics(router, MonotonicClock())
    doors = DoorSettings(router, metrics, security)
    front_door, port = await serve(doors, ("127.0.0.1", 0))
    http_door, http_port = await serve_http(doors, ("127.0.0.1", 0))
    scheme = "http" if security.tls is None else "https"
    await router.set_membership(Membership(1, tuple(infos)))
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    try:
        yield RouterBench(
            router=router,
            doors=doors,
            front_door=front_door,
            channel=channel,
            channel_target=f"127.0.0.1:{port}",
            http_url=f"{scheme}://127.0.0.1:{http_port}",
            http_door=http_door,
        )
    finally:
        await channel.close()
        await http_door.stop()
        await front_door.stop()
        await security.stop()
        await router.stop()
        for worker in workers:
            await worker.stop()


async def eventually(condition: Callable[[], bool], within_s: float = HANG_GUARD_S) -> None:
    """Wait until `condition` holds; fails when it does not in time."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - any condition, so there is no event
            await asyncio.sleep(0.005)


def text_of(responses: list[Any]) -> str:
    return "".join(response.text for response in responses)
