"""The `Worker` gRPC service: attempts in, tokens, KV events and status out."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, TypeVar

from decode_worker.attempt_exchange import AttemptExchange
from engine.auditor import RunAudit
from engine.kv_event_feed import Subscribe, Unsubscribe, blocks_in
from engine.tree_viewer import ShowTree
from kv_transfer.events import ShowHandoffs
from kvferry.convert import (
    accounts_to_wire,
    audit_report_to_wire,
    host_accounts_to_wire,
    kv_batch_to_wire,
    load_to_wire,
)
from kvferry.convert_views import handoffs_to_wire, tree_query_from_wire, tree_view_to_wire
from kvferry.errors import DeadlineExceeded, InvalidInput, WorkerUnavailable
from kvferry.limits import (
    AUDIT_TIMEOUT_S,
    CONSOLE_TREE_DEPTH_MAX,
    CONSOLE_TREE_NODES_MAX,
    CONSOLE_TREE_TOKENS_MAX,
    TREE_PATH_NODES_MAX,
    VIEW_TIMEOUT_S,
    WRITER_CHECK_INTERVAL_S,
)
from kvferry.rpc.v1 import worker_pb2 as worker
from kvferry.rpc.v1 import worker_pb2_grpc
from kvferry.rpc_errors import status_of_errors

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import grpc

    from engine.step_loop import StepLoop
    from kvferry.audit_report import AuditReport
    from kvferry.handoff_view import HandoffView
    from kvferry.kv_events import KvEventBatch
    from kvferry.membership import WorkerInfo
    from kvferry.tree_view import TreeQuery, TreeView

_Answer = TypeVar("_Answer")


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
            report: AuditReport = await self._from_engine(RunAudit, "audit", AUDIT_TIMEOUT_S)
        return worker.WorkerAuditResponse(
            incarnation=self._info.incarnation, report=audit_report_to_wire(report)
        )

    async def Tree(
        self, request: worker.WorkerTreeRequest, context: grpc.aio.ServicerContext
    ) -> worker.WorkerTreeResponse:
        """Have the engine thread show a part of its index before its next step."""
        async with status_of_errors(context):
            query = _bounded(tree_query_from_wire(request))
            view: TreeView = await self._from_engine(
                lambda deliver: ShowTree(query, deliver), "view of its index", VIEW_TIMEOUT_S
            )
        return tree_view_to_wire(view, self._info.incarnation)

    async def Handoffs(
        self, request: worker.WorkerHandoffsRequest, context: grpc.aio.ServicerContext
    ) -> worker.WorkerHandoffsResponse:
        """Have the engine thread show its handoffs before its next step."""
        async with status_of_errors(context):
            views: tuple[HandoffView, ...] = await self._from_engine(
                ShowHandoffs, "view of its handoffs", VIEW_TIMEOUT_S
            )
        return handoffs_to_wire(views, self._info.incarnation)

    async def _from_engine(
        self, ask: Callable[[Callable[[_Answer], None]], object], what: str, timeout_s: float
    ) -> _Answer:
        """What the engine thread delivers to the event that `ask` makes."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[_Answer] = loop.create_future()
        self._step_loop.post(ask(lambda value: _deliver(loop, answer, value)))
        deadline = loop.time() + timeout_s
        while loop.time() < deadline:
            if not self._step_loop.is_alive():
                raise WorkerUnavailable("the engine has stopped")
            done, _ = await asyncio.wait({answer}, timeout=WRITER_CHECK_INTERVAL_S)
            if done:
                return answer.result()
        raise DeadlineExceeded(f"the engine did not come to the {what} within {timeout_s:g} s")


def _bounded(query: TreeQuery) -> TreeQuery:
    """Whoever asks, the engine's time is bounded here. Raises `InvalidInput`."""
    bounds = (
        ("nodes_max", query.nodes_max, 1, CONSOLE_TREE_NODES_MAX),
        ("depth_max", query.depth_max, 1, CONSOLE_TREE_DEPTH_MAX),
        ("tokens_max", query.tokens_max, 0, CONSOLE_TREE_TOKENS_MAX),
        ("path", len(query.path), 0, TREE_PATH_NODES_MAX),
    )
    for name, value, low, high in bounds:
        if not low <= value <= high:
            raise InvalidInput(name, f"is {value}; must be {low} to {high}")
    return query


def _deliver(
    loop: asyncio.AbstractEventLoop, answer: asyncio.Future[_Answer], value: _Answer
) -> None:
    """Hand something from the engine thread to the event loop; a caller that left is no error."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(_set_result, answer, value)


def _set_result(answer: asyncio.Future[_Answer], value: _Answer) -> None:
    if not answer.done():
        answer.set_result(value)


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
