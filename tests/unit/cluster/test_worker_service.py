"""The worker's gRPC service over an engine thread that is none, read by the router's client."""

from __future__ import annotations

import asyncio
from threading import Thread

import grpc.aio
import numpy as np
import pytest

from cluster import worker_service
from cluster.worker_service import WorkerService
from decode_worker import attempt_exchange
from decode_worker.intake import CancelAttempt, EndSample, StartAttempt
from engine.auditor import RunAudit
from engine.kv_event_feed import Subscribe, Unsubscribe
from kvferry.accounts import KvAccounts
from kvferry.audit_report import AuditReport
from kvferry.cache_key import CacheUse
from kvferry.errors import DeadlineExceeded, InternalError, Overloaded, WorkerUnavailable
from kvferry.generation import AttemptRequest
from kvferry.ids import Attempt, AttemptId, ExtraKey, Incarnation, RequestId, WorkerId
from kvferry.kv_events import BlockHash, BlocksStored, KvEventBatch
from kvferry.membership import Role, WorkerInfo
from kvferry.rpc.v1 import worker_pb2_grpc
from kvferry.sampling import SamplingParams
from router.grpc_worker_client import GrpcWorkerClient
from tests.support.router_bench import eventually


class FakeStepLoop:
    """Answers each attempt with `answer`."""

    def __init__(self, answer=None, *, alive=True):
        self.answer = answer
        self.alive = alive
        self.posted = []

    def is_alive(self):
        return self.alive

    def now(self):
        return 0.0

    def post(self, event):
        self.posted.append(type(event))
        if isinstance(event, StartAttempt) and self.answer is not None:
            event.stream.deliver(self.answer)
        if isinstance(event, RunAudit) and self.answer is not None:
            # As in life: from another thread.
            Thread(target=event.deliver, args=(self.answer,)).start()


def serve(step_loop, scenario):
    """Run `scenario(client)` against a served `step_loop`."""

    async def run():
        server = grpc.aio.server()
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        info = WorkerInfo(WorkerId("decode-0"), Role.DECODE, Incarnation(7), address)
        worker_pb2_grpc.add_WorkerServicer_to_server(WorkerService(info, step_loop), server)
        await server.start()
        client = GrpcWorkerClient(info)
        try:
            async with asyncio.timeout(60):
                await scenario(client)
        finally:
            await client.close()
            await server.stop(None)

    asyncio.run(run())


ATTEMPT = AttemptRequest(
    id=AttemptId(RequestId("request"), Attempt(1)),
    prompt=np.array([1, 2], np.int32),
    sampling=SamplingParams(),
    cache_use=CacheUse(ExtraKey("")),
    source=None,
)


@pytest.fixture(autouse=True)
def quick_checks(monkeypatch):
    monkeypatch.setattr(worker_service, "WRITER_CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(attempt_exchange, "WRITER_CHECK_INTERVAL_S", 0.01)


def test_an_overloaded_worker_says_when_to_try_again():
    async def scenario(client):
        with pytest.raises(Overloaded, match="the queue is full") as refused:
            await client.generate(ATTEMPT, timeout_s=60.0).read()
        assert refused.value.retry_after_s == 2.5

    step_loop = FakeStepLoop(Overloaded("the queue is full", 2.5))
    serve(step_loop, scenario)
    assert step_loop.posted == [StartAttempt]


def test_another_incarnation_is_refused_as_gone_and_reaches_no_engine():
    async def scenario(client):
        client._info = WorkerInfo(
            client._info.worker_id, client._info.role, Incarnation(6), client._info.address
        )
        with pytest.raises(WorkerUnavailable, match="incarnation 6 of decode-0 is gone"):
            await client.generate(ATTEMPT, timeout_s=60.0).read()

    step_loop = FakeStepLoop()
    serve(step_loop, scenario)
    assert step_loop.posted == []


def test_a_fault_of_ours_ends_the_call_as_internal():
    class Broken(FakeStepLoop):
        def post(self, event):
            if isinstance(event, StartAttempt):
                raise ValueError("a bug")

    async def scenario(client):
        with pytest.raises(InternalError, match="a fault of the server"):
            await client.generate(ATTEMPT, timeout_s=60.0).read()

    serve(Broken(), scenario)


def test_the_end_of_a_sample_and_of_an_attempt_reach_the_engine():
    async def scenario(client):
        stream = client.generate(ATTEMPT, timeout_s=60.0)
        stream.end_sample(3)
        await eventually(lambda: step_loop.posted == [StartAttempt, EndSample])
        stream.abort(InternalError("enough"))
        await eventually(lambda: step_loop.posted == [StartAttempt, EndSample, CancelAttempt])
        with pytest.raises(InternalError, match="enough"):
            await stream.read()

    step_loop = FakeStepLoop()
    serve(step_loop, scenario)


def test_attempts_of_a_dead_engine_end():
    async def scenario(client):
        with pytest.raises(WorkerUnavailable, match="decode-0: the engine has stopped"):
            await client.generate(ATTEMPT, timeout_s=60.0).read()

    serve(FakeStepLoop(alive=False), scenario)


def test_kv_events_of_a_dead_engine_end():
    async def scenario(client):
        with pytest.raises(WorkerUnavailable, match="the engine has stopped"):
            await anext(client.kv_events())

    step_loop = FakeStepLoop(alive=False)
    serve(step_loop, scenario)
    assert step_loop.posted == [Subscribe, Unsubscribe]


REPORT = AuditReport(("check 1: slot 4 is lost",), KvAccounts(4, 0, 0, 0, 0, 8, 0, 0, 2), 0.25, 9)


def test_an_audit_is_run_by_the_engine_and_told():
    async def scenario(client):
        assert await client.audit(timeout_s=60.0) == REPORT

    step_loop = FakeStepLoop(REPORT)
    serve(step_loop, scenario)
    assert step_loop.posted == [RunAudit]


def test_an_audit_of_a_dead_engine_ends():
    async def scenario(client):
        with pytest.raises(WorkerUnavailable, match="the engine has stopped"):
            await client.audit(timeout_s=60.0)

    serve(FakeStepLoop(REPORT, alive=False), scenario)


def test_an_audit_that_the_engine_does_not_come_to_ends(monkeypatch):
    monkeypatch.setattr(worker_service, "AUDIT_TIMEOUT_S", 0.05)

    async def scenario(client):
        with pytest.raises(DeadlineExceeded, match=r"did not come to the audit within 0.05 s"):
            await client.audit(timeout_s=60.0)

    serve(FakeStepLoop(), scenario)


def test_another_incarnation_does_not_answer_for_the_one_asked():
    async def scenario(client):
        client._info = WorkerInfo(
            client._info.worker_id, client._info.role, Incarnation(6), client._info.address
        )
        with pytest.raises(WorkerUnavailable, match="decode-0 was started anew"):
            await client.audit(timeout_s=60.0)

    serve(FakeStepLoop(REPORT), scenario)


def _batch(number, snapshot=False):
    events = (BlocksStored((BlockHash(number), BlockHash(number + 100))),)
    return KvEventBatch(WorkerId("decode-0"), Incarnation(7), number, snapshot, events)


def test_a_subscription_counts_what_its_reader_has_not_taken():
    """A snapshot is no backlog, but a reader that has not taken it has not caught up."""

    async def scenario():
        subscription = worker_service._Subscription(asyncio.get_running_loop())
        assert subscription.is_caught_up()
        subscription.deliver(_batch(0, snapshot=True))
        assert (subscription.backlog_blocks(), subscription.is_caught_up()) == (0, False)
        subscription.deliver(_batch(1))
        assert (subscription.backlog_blocks(), subscription.is_caught_up()) == (2, False)
        batches = subscription.batches(lambda: True)
        assert (await anext(batches)).snapshot
        assert (subscription.backlog_blocks(), subscription.is_caught_up()) == (2, False)
        assert (await anext(batches)).sequence == 1
        assert (subscription.backlog_blocks(), subscription.is_caught_up()) == (0, True)
        subscription.end()
        assert [batch async for batch in batches] == []

    asyncio.run(scenario())
