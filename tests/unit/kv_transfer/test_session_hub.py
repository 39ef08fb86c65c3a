"""A hub that stops: it takes no more sessions, and waits for a bounded time."""

from __future__ import annotations

import asyncio
import socket

import grpc
import pytest

from kv_transfer import session_hub
from kv_transfer.protocol.messages import Hello
from kv_transfer.session_hub import HandoffServicer, SessionHub
from kvferry.clock import MonotonicClock
from kvferry.generation import PrefillSource
from kvferry.ids import Incarnation, WorkerId
from kvferry.rpc.v1 import handoff_pb2_grpc as rpc
from tests.support.memory_link import MemoryLinkFactory

OURS = Hello(WorkerId("here"), Incarnation(1), "layout", 64, heads=4)


def new_hub(post=lambda event: None) -> SessionHub:
    factories = {"memory": MemoryLinkFactory(1.0, 1, 64)}
    return SessionHub(OURS, asyncio.get_running_loop(), post, factories, 1.0, MonotonicClock())


def test_a_closed_hub_refuses_a_session_at_once() -> None:
    events: list[object] = []

    async def go() -> grpc.aio.AioRpcError:
        hub = new_hub(events.append)
        server = grpc.aio.server()
        rpc.add_HandoffServicer_to_server(HandoffServicer(hub), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        hub.close("enough")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = rpc.HandoffStub(channel).Session()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asyncio.wait_for(call.read(), 60)
        await server.stop(None)
        return caught.value

    error = asyncio.run(go())
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "stopping" in error.details()
    assert not events, "the engine never heard of it"


def test_waiting_for_the_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_hub, "STOP_TIMEOUT_S", 0.1)

    async def go() -> float:
        # Its kernel takes the connection, and nobody ever speaks on it.
        silent = socket.create_server(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        hub = new_hub()
        hub.connect(PrefillSource(WorkerId("there"), f"127.0.0.1:{port}", Incarnation(2)))
        await asyncio.sleep(0.02)
        hub.close("enough")
        start = MonotonicClock().now()
        await hub.wait_closed()
        waited_s = MonotonicClock().now() - start
        silent.close()
        return waited_s

    assert asyncio.run(go()) < 10.0
