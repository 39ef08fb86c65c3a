"""What a call to a worker ends with when the connection goes while somebody waits."""

from __future__ import annotations

import asyncio

import grpc
import numpy as np
import pytest

from kvferry.cache_key import CacheUse
from kvferry.errors import WorkerUnavailable
from kvferry.generation import AttemptRequest
from kvferry.ids import Attempt, AttemptId, ExtraKey, Incarnation, RequestId, WorkerId
from kvferry.membership import Role, WorkerInfo
from kvferry.rpc.v1 import worker_pb2_grpc
from kvferry.sampling import SamplingParams
from router.grpc_worker_client import GrpcWorkerClient


class SilentWorker(worker_pb2_grpc.WorkerServicer):
    """Takes every call and answers none."""

    def __init__(self):
        self.called = asyncio.Event()

    async def _silence(self):
        self.called.set()
        await asyncio.sleep(60)

    async def Status(self, request, context):
        await self._silence()

    async def Audit(self, request, context):
        await self._silence()

    async def Attempts(self, messages, context):
        await anext(messages)
        await self._silence()
        yield None

    async def KvEvents(self, request, context):
        await self._silence()
        yield None


def _attempt():
    return AttemptRequest(
        id=AttemptId(RequestId("a"), Attempt(1)),
        prompt=np.asarray([1, 2], dtype=np.int32),
        sampling=SamplingParams(max_tokens=1),
        cache_use=CacheUse(ExtraKey("")),
        source=None,
    )


WAITS = {
    "status": lambda client: client.status(30.0),
    "audit": lambda client: client.audit(30.0),
    "read": lambda client: client.generate(_attempt(), 30.0).read(),
    "events": lambda client: anext(client.kv_events()),
}


async def _with_client(scenario):
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    worker = SilentWorker()
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)
    await server.start()
    info = WorkerInfo(WorkerId("decode-0"), Role.DECODE, Incarnation(1), f"127.0.0.1:{port}")
    client = GrpcWorkerClient(info)
    try:
        await scenario(client, worker)
    finally:
        await client.close()
        await server.stop(None)


@pytest.mark.parametrize("wait", WAITS)
def test_a_closed_connection_is_an_error_of_the_worker_and_no_cancellation(wait):
    async def scenario(client, worker):
        # In a task of its own, as checks of several workers are.
        waiting = asyncio.ensure_future(WAITS[wait](client))
        await asyncio.wait_for(worker.called.wait(), 60)
        await client.close()
        with pytest.raises(WorkerUnavailable, match="decode-0"):
            await asyncio.wait_for(waiting, 60)

    asyncio.run(_with_client(scenario))


@pytest.mark.parametrize("wait", WAITS)
def test_who_waits_can_be_cancelled(wait):
    async def scenario(client, worker):
        waiting = asyncio.ensure_future(WAITS[wait](client))
        await asyncio.wait_for(worker.called.wait(), 60)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(waiting, 60)

    asyncio.run(_with_client(scenario))
