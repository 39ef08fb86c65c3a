"""`WorkerClient` over one gRPC channel: one stream for all attempts, one for KV events, calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc.aio

from kvferry import convert, convert_views
from kvferry.errors import WorkerUnavailable
from kvferry.limits import WORKER_MESSAGE_BYTES_MAX
from kvferry.rpc.v1 import worker_pb2
from router.attempt_exchange import AttemptExchange
from router.worker_client import WorkerStatus
from router.worker_errors import errors_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from kvferry.audit_report import AuditReport
    from kvferry.errors import KvferryError
    from kvferry.generation import AttemptRequest
    from kvferry.handoff_view import HandoffView
    from kvferry.kv_events import KvEventBatch
    from kvferry.membership import WorkerInfo
    from kvferry.tree_view import TreeQuery, TreeView
    from router.worker_client import AttemptStream

_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", WORKER_MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", WORKER_MESSAGE_BYTES_MAX),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
    # Own connection per client object: a restarted worker must not inherit another's backoff.
    ("grpc.use_local_subchannel_pool", 1),
)


class GrpcWorkerClient:
    """`WorkerClient` over one gRPC channel.

    The stream of attempts is opened with the first attempt, and anew with the first one after it
    broke. While the channel cannot connect, such an attempt fails at once and the channel's
    backoff (0.1 s to 1 s) decides when the next connection is tried.
    """

    def __init__(self, info: WorkerInfo) -> None:
        self._info = info
        self._channel = grpc.aio.insecure_channel(info.address, options=_CHANNEL_OPTIONS)
        service = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name
        self._attempts = self._channel.stream_stream(
            f"/{service}/Attempts",
            request_serializer=worker_pb2.AttemptCommands.SerializeToString,
            response_deserializer=worker_pb2.AttemptEvents.FromString,
        )
        self._kv_events = self._channel.unary_stream(
            f"/{service}/KvEvents",
            request_serializer=worker_pb2.KvEventsRequest.SerializeToString,
            response_deserializer=worker_pb2.KvEventBatch.FromString,
        )
        self._status = self._unary(
            f"/{service}/Status", worker_pb2.WorkerStatusRequest, worker_pb2.WorkerStatusResponse
        )
        self._audit = self._unary(
            f"/{service}/Audit", worker_pb2.WorkerAuditRequest, worker_pb2.WorkerAuditResponse
        )
        self._tree = self._unary(
            f"/{service}/Tree", worker_pb2.WorkerTreeRequest, worker_pb2.WorkerTreeResponse
        )
        self._handoffs = self._unary(
            f"/{service}/Handoffs",
            worker_pb2.WorkerHandoffsRequest,
            worker_pb2.WorkerHandoffsResponse,
        )
        self._exchange: AttemptExchange | None = None

    def generate(self, request: AttemptRequest, timeout_s: float) -> AttemptStream:
        """Start an attempt; it ends after `timeout_s`, here and at the worker."""
        exchange = self._exchange
        if exchange is None or exchange.has_ended:
            exchange = self._exchange = AttemptExchange(self._attempts(), self._info)
        return exchange.start(request, timeout_s)

    async def kv_events(self) -> AsyncGenerator[KvEventBatch, None]:
        """Batches until the stream breaks, which raises."""
        call = self._kv_events(worker_pb2.KvEventsRequest())
        try:
            with errors_of(self._info):
                async for message in call:
                    yield convert.kv_batch_from_wire(message)
        finally:
            call.cancel()

    async def status(self, timeout_s: float) -> WorkerStatus:
        """Raises `WorkerUnavailable` when another incarnation answers at this address."""
        with errors_of(self._info):
            message = await self._status(worker_pb2.WorkerStatusRequest(), timeout=timeout_s)
        self._check_incarnation(message.incarnation)
        return WorkerStatus(
            incarnation=self._info.incarnation,
            load=convert.load_from_wire(message.load),
            accounts=convert.accounts_from_wire(message.accounts),
            host_accounts=convert.host_accounts_from_wire(message),
            pid=message.pid,
            counters=dict(message.counters),
        )

    async def audit(self, timeout_s: float) -> AuditReport:
        """Raises `WorkerUnavailable` when another incarnation answers at this address."""
        with errors_of(self._info):
            message = await self._audit(worker_pb2.WorkerAuditRequest(), timeout=timeout_s)
        self._check_incarnation(message.incarnation)
        return convert.audit_report_from_wire(message.report)

    async def tree(self, query: TreeQuery, timeout_s: float) -> TreeView:
        """Raises `WorkerUnavailable` when another incarnation answers at this address."""
        request = convert_views.tree_query_to_wire(query)
        with errors_of(self._info):
            message = await self._tree(request, timeout=timeout_s)
        self._check_incarnation(message.incarnation)
        return convert_views.tree_view_from_wire(message)

    async def handoffs(self, timeout_s: float) -> tuple[HandoffView, ...]:
        """Raises `WorkerUnavailable` when another incarnation answers at this address."""
        with errors_of(self._info):
            message = await self._handoffs(worker_pb2.WorkerHandoffsRequest(), timeout=timeout_s)
        self._check_incarnation(message.incarnation)
        return convert_views.handoffs_from_wire(message)

    def abort_streams(self, error: KvferryError) -> None:
        """End every attempt of this client, and the stream they came on."""
        if self._exchange is not None:
            self._exchange.end(error)

    async def close(self) -> None:
        """Close the channel; calls that still run are cancelled."""
        if self._exchange is not None:
            await self._exchange.close()
        await self._channel.close()

    def _check_incarnation(self, incarnation: int) -> None:
        if incarnation != self._info.incarnation:
            raise WorkerUnavailable(f"worker {self._info.worker_id} was started anew")

    def _unary(self, method: str, request: Any, response: Any) -> Any:
        return self._channel.unary_unary(
            method,
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )
