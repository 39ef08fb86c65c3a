"""The `Worker` gRPC service: attempts in, tokens, KV events and status out."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from decode_worker.attempt_exchange import AttemptExchange
from engine.auditor import RunAudit
from engine.kv_event_feed import Subscribe, Unsubscribe, blocks_in
from kvferry.convert import (
    accounts_to_wire,
    audit_report_to_wire,
    host_accounts_to_wire,
    kv_batch_to_wire,
    load_to_wire,
)
from kvferry.errors import DeadlineExceeded, WorkerUnavailable
from kvferry.limits import AUDIT_TIMEOUT_S, WRITER_CHECK_INTERVAL_S
from kvferry.rpc.v1 import worker_pb2 as worker
from kvferry.rpc.v1 import worker_pb2_grpc
from kvferry.rpc_errors import status_of_errors

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import grpc

    from engine.step_loop import StepLoop
    from kvferry.audit_report import AuditReport
    from kvferry.kv_events import KvEventBatch
    from kvferry.membership import WorkerInfo


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Translates between gRPC calls on the event loop and events of the engine thread."""

    def __init__(self, info: WorkerInfo, step_loop: StepLoop) -> None:
        self._info = info
        self._step_loop = step_loop

    async def Attempts(
        self,
        request_iterator: AsyncIterator[worker.AttemptCommands],
        context: grpc.aio.ServicerContext,
    ) -> None:
        """Run the attempts of one router. The end of the call, however it comes, ends them."""
        async with status_of_errors(context):
            await AttemptExchange(self._info, self._step_loop).run(context)

    async def KvEvents(
        self, request: worker.KvEventsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker.KvEventBatch]:
        """Stream what the radix cache holds, a snapshot first."""
        async with status_of_errors(context):
            subscription = _Subscription(asyncio.get_running_loop())
            self._step_loop.post(Subscribe(subscription))
            try:
                async for batch in subscription.batches(self._step_loop.is_alive):
                    yield kv_batch_to_wire(batch)
            finally:
                self._step_loop.post(Unsubscribe(subscription))

    async def Status(
        self, request: worker.WorkerStatusRequest, context: grpc.aio.ServicerContext
    ) -> worker.WorkerStatusResponse:
        """The engine thread's last snapshot; never waits for a step."""
        async with status_of_errors(context):
            if not self._step_loop.is_alive():
                raise WorkerUnavailable("the engine has stopped")
        snapshot = self._step_loop.snapshot
        return worker.WorkerStatusResponse(
            worker_id=self._info.worker_id,
            role=self._info.role.value,
            incarnation=self._info.incarnation,
            load=load_to_wire(snapshot.load),
            accounts=accounts_to_wire(snapshot.accounts),
            host_accounts=host_accounts_to_wire(snapshot.host_accounts),
            pid=os.getpid(),
            counters=snapshot.counters,
        )

    async def Audit(
        self, request: worker.WorkerAuditRequest, context: grpc.aio.ServicerContext
    ) -> worker.WorkerAuditResponse:
        """Have the engine thread run every ledger check before its next step."""
        async with status_of_errors(context):
            report = await self._run_audit()
        return worker.WorkerAuditResponse(
            incarnation=self._info.incarnation, report=audit_report_to_wire(report)
        )

    async def _run_audit(self) -> AuditReport:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[AuditReport] = loop.create_future()
        self._step_loop.post(RunAudit(lambda report: _answer(loop, answer, report)))
        deadline = loop.time() + AUDIT_TIMEOUT_S
        while loop.time() < deadline:
            if not self._step_loop.is_alive():
                raise WorkerUnavailable("the engine has stopped")
            done, _ = await asyncio.wait({answer}, timeout=WRITER_CHECK_INTERVAL_S)
            if done:
                return answer.result()
        raise DeadlineExceeded(f"the engine did not come to the audit within {AUDIT_TIMEOUT_S:g} s")


def _answer(
    loop: asyncio.AbstractEventLoop, answer: asyncio.Future[AuditReport], report: AuditReport
) -> None:
    """Hand a report from the engine thread to the event loop; a caller that left is no error."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(_set_result, answer, report)


def _set_result(answer: asyncio.Future[AuditReport], report: AuditReport) -> None:
    if not answer.done():
        answer.set_result(report)


class _Subscription:
    """A `KvSubscriber` whose batches are read on the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: asyncio.Queue[KvEventBatch | None] = asyncio.Queue()
        # The engine thread writes the first two, the event loop the others.
        self._delivered_blocks = 0
        self._delivered_batches = 0
        self._taken_blocks = 0
        self._taken_batches = 0

    def deliver(self, batch: KvEventBatch) -> None:
        self._delivered_blocks += blocks_in(batch)
        self._delivered_batches += 1
        self._post(batch)

    def backlog_blocks(self) -> int:
        return self._delivered_blocks - self._taken_blocks

    def is_caught_up(self) -> bool:
        return self._delivered_batches == self._taken_batches

    def end(self) -> None:
        self._post(None)

    async def batches(self, is_alive: Callable[[], bool]) -> AsyncIterator[KvEventBatch]:
        """The batches in order, up to the end of the subscription.

        `is_alive` tells whether somebody still writes; once it is False and nothing is left to
        read, `WorkerUnavailable` is raised.
        """
        while True:
            try:
                # Not `wait_for`, which loses a cancellation that comes together with a batch.
                async with asyncio.timeout(WRITER_CHECK_INTERVAL_S):
                    batch = await self._queue.get()
            except TimeoutError:
                if is_alive():
                    continue
                raise WorkerUnavailable("the engine has stopped") from None
            if batch is None:
                return
            self._taken_blocks += blocks_in(batch)
            self._taken_batches += 1
            yield batch

    def _post(self, item: KvEventBatch | None) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)
