"""One worker as the router speaks to it: an interface, and its gRPC implementation."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import grpc
import grpc.aio

from kvferry import convert
from kvferry.errors import (
    STATUS,
    DeadlineExceeded,
    ErrorKind,
    InternalError,
    InvalidInput,
    KvferryError,
    Overloaded,
    WorkerUnavailable,
)
from kvferry.limits import WORKER_MESSAGE_BYTES_MAX, WORKER_STATUS_TIMEOUT_S
from kvferry.rpc.v1 import worker_pb2
from kvferry.rpc_errors import RETRY_PUSHBACK_KEY, is_task_cancelled

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator, Mapping

    from kvferry.accounts import HostAccounts, KvAccounts, WorkerLoad
    from kvferry.audit_report import AuditReport
    from kvferry.generation import AttemptOutput, AttemptRequest
    from kvferry.ids import Incarnation
    from kvferry.kv_events import KvEventBatch
    from kvferry.membership import WorkerInfo

_RETRY_AFTER_DEFAULT_S = 1.0

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


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker's answer to a status call."""

    incarnation: Incarnation
    load: WorkerLoad
    accounts: KvAccounts
    host_accounts: HostAccounts | None
    """None without a host tier."""
    pid: int
    counters: Mapping[str, int]
    """What happened since the process started."""


class AttemptStream(Protocol):
    """The outputs of one attempt."""

    async def read(self) -> AttemptOutput | None:
        """The next output; None after the last one. Raises `KvferryError`."""
        ...

    def end_sample(self, sample: int) -> None:
        """Let the worker know that it need not go on with one sample; the others go on.

        A wish: if it is lost, what the worker still says of that sample is of no interest.
        """
        ...

    def abort(self, error: KvferryError) -> None:
        """End the attempt at the worker; a pending or later `read` raises `error`.

        Does nothing to an attempt that has ended. May be called at any time, any number of times.
        """
        ...


class WorkerClient(Protocol):
    """Calls to one worker process. Everything may raise `KvferryError`."""

    def generate(self, request: AttemptRequest, timeout_s: float) -> AttemptStream:
        """Start an attempt."""
        ...

    def kv_events(self) -> AsyncGenerator[KvEventBatch, None]:
        """KV events from now on, beginning with a snapshot."""
        ...

    async def status(self, timeout_s: float) -> WorkerStatus:
        """Ask for load and accounts."""
        ...

    async def audit(self, timeout_s: float) -> AuditReport:
        """Run every ledger check."""
        ...

    def abort_streams(self, error: KvferryError) -> None:
        """End every attempt that is running here, because the worker is gone."""
        ...

    async def close(self) -> None:
        """Free the connection."""
        ...


class GrpcWorkerClient:
    """`WorkerClient` over one gRPC channel."""

    def __init__(self, info: WorkerInfo) -> None:
        self._info = info
        self._channel = grpc.aio.insecure_channel(info.address, options=_CHANNEL_OPTIONS)
        service = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name
        self._generate = self._channel.unary_stream(
            f"/{service}/Generate",
            request_serializer=worker_pb2.AttemptRequest.SerializeToString,
            response_deserializer=worker_pb2.AttemptOutput.FromString,
        )
        self._end_sample = self._channel.unary_unary(
            f"/{service}/EndSample",
            request_serializer=worker_pb2.EndSampleRequest.SerializeToString,
            response_deserializer=worker_pb2.EndSampleResponse.FromString,
        )
        self._kv_events = self._channel.unary_stream(
            f"/{service}/KvEvents",
            request_serializer=worker_pb2.KvEventsRequest.SerializeToString,
            response_deserializer=worker_pb2.KvEventBatch.FromString,
        )
        self._status = self._channel.unary_unary(
            f"/{service}/Status",
            request_serializer=worker_pb2.WorkerStatusRequest.SerializeToString,
            response_deserializer=worker_pb2.WorkerStatusResponse.FromString,
        )
        self._audit = self._channel.unary_unary(
            f"/{service}/Audit",
            request_serializer=worker_pb2.WorkerAuditRequest.SerializeToString,
            response_deserializer=worker_pb2.WorkerAuditResponse.FromString,
        )
        self._streams: set[_GrpcAttemptStream] = set()
        self._calls: set[Any] = set()

    def generate(self, request: AttemptRequest, timeout_s: float) -> AttemptStream:
        """Start an attempt; the worker drops it by itself after `timeout_s`."""
        message = convert.attempt_request_to_wire(request, self._info.incarnation)
        end_sample = partial(self._begin_end_sample, message)
        call = self._generate(message, timeout=timeout_s)
        stream = _GrpcAttemptStream(call, self._info, end_sample)
        self._streams.add(stream)
        stream.call.add_done_callback(lambda _: self._streams.discard(stream))
        return stream

    async def kv_events(self) -> AsyncGenerator[KvEventBatch, None]:
        """Batches until the stream breaks, which raises."""
        call = self._kv_events(worker_pb2.KvEventsRequest())
        try:
            with _errors_of(self._info):
                async for message in call:
                    yield convert.kv_batch_from_wire(message)
        finally:
            call.cancel()

    async def status(self, timeout_s: float) -> WorkerStatus:
        """Raises `WorkerUnavailable` when another incarnation answers at this address."""
        with _errors_of(self._info):
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
        with _errors_of(self._info):
            message = await self._audit(worker_pb2.WorkerAuditRequest(), timeout=timeout_s)
        self._check_incarnation(message.incarnation)
        return convert.audit_report_from_wire(message.report)

    def _begin_end_sample(self, attempt: worker_pb2.AttemptRequest, sample: int) -> None:
        message = worker_pb2.EndSampleRequest(
            request_id=attempt.request_id,
            attempt=attempt.attempt,
            incarnation=attempt.incarnation,
            sample=sample,
        )
        call = self._end_sample(message, timeout=WORKER_STATUS_TIMEOUT_S)
        # Nobody waits for it, so somebody has to keep it.
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    def _check_incarnation(self, incarnation: int) -> None:
        if incarnation != self._info.incarnation:
            raise WorkerUnavailable(f"worker {self._info.worker_id} was started anew")

    def abort_streams(self, error: KvferryError) -> None:
        """End every attempt of this client."""
        for stream in tuple(self._streams):
            stream.abort(error)

    async def close(self) -> None:
        """Close the channel; calls that still run are cancelled."""
        await self._channel.close()


class _GrpcAttemptStream:
    """`AttemptStream` over one call."""

    def __init__(self, call: Any, info: WorkerInfo, end_sample: Callable[[int], None]) -> None:
        self.call = call
        self.end_sample = end_sample
        self._info = info
        self._error: KvferryError | None = None

    async def read(self) -> AttemptOutput | None:
        """See `AttemptStream`."""
        self._raise_if_aborted()
        try:
            with _errors_of(self._info):
                message = await self.call.read()
        except KvferryError:
            # The reason for which `abort` cancelled the call says more.
            self._raise_if_aborted()
            raise
        if message is grpc.aio.EOF:
            return None
        return convert.attempt_output_from_wire(message)

    def abort(self, error: KvferryError) -> None:
        """See `AttemptStream`."""
        if self._error is None and not self.call.done():
            self._error = error
            self.call.cancel()

    def _raise_if_aborted(self) -> None:
        if self._error is not None:
            raise self._error


@contextlib.contextmanager
def _errors_of(info: WorkerInfo) -> Iterator[None]:
    """Make an error of ours of whatever a call to a worker ends with.

    A channel that is closed, or a call that is, cancels the wait for it and not the task that
    waits. Let through, that would look to everybody above as if the client had gone away.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error, info) from error
    except asyncio.CancelledError as error:
        if is_task_cancelled():
            raise
        raise WorkerUnavailable(f"the connection to worker {info.worker_id} was closed") from error


def error_from_rpc(error: grpc.aio.AioRpcError, info: WorkerInfo) -> KvferryError:
    """The error a worker's failed call stands for.

    Not its words alone: a client must be able to see which worker failed.
    """
    text = f"worker {info.worker_id}: {error.details() or error.code().name}"
    match _KIND_OF_CODE.get(error.code().name):
        case ErrorKind.OVERLOADED:
            return Overloaded(text, _retry_after_s(error))
        case ErrorKind.UNAVAILABLE:
            return WorkerUnavailable(text)
        case ErrorKind.DEADLINE:
            return DeadlineExceeded(text)
        case ErrorKind.INVALID_INPUT:
            # Validated here already, but only the worker knows what its memory holds.
            return InvalidInput("request", text)
        case _:
            return InternalError(text)


_KIND_OF_CODE = {status.grpc: kind for kind, status in STATUS.items()} | {
    # A server that shuts down ends its calls with this; the request itself was not ended.
    "CANCELLED": ErrorKind.UNAVAILABLE,
}


def _retry_after_s(error: grpc.aio.AioRpcError) -> float:
    for key, value in error.trailing_metadata() or ():
        if key == RETRY_PUSHBACK_KEY and str(value).isdigit():
            return int(value) / 1000.0
    return _RETRY_AFTER_DEFAULT_S
