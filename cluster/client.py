"""A blocking gRPC client of a router, for the command line and the demo."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from cluster.client_security import ClientSecurity
from kvferry.limits import (
    AUDIT_CALL_GRACE_S,
    AUDIT_TIMEOUT_S,
    CLIENT_MESSAGE_BYTES_MAX,
    STOP_TIMEOUT_S,
)
from kvferry.rpc.v1 import inference_pb2 as inference
from kvferry.rpc.v1 import inference_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

_STATUS_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 1.0

QUIET_MAX_S = 15.0
"""After so long without a word of the router, it is asked whether it lives. Above the 10 s that
its server allows as the shortest interval, so that lateness is not taken for impatience."""

_NO_SECURITY = ClientSecurity()

_PING_TIMEOUT_S = 5.0
"""A router whose machine or process is gone without a word ends a call after 20 s."""


class CallFailed(Exception):
    """The router refused a call, or could not be reached. The message is for the user."""


class Client:
    """Calls of one router. Use as a context manager."""

    def __init__(
        self,
        address: str,
        quiet_max_s: float = QUIET_MAX_S,
        security: ClientSecurity = _NO_SECURITY,
    ) -> None:
        """Raises `InvalidInput` for files of `security` that cannot be used."""
        self._address = address
        self._metadata = security.metadata
        self._channel = security.open_channel(
            address,
            options=[
                ("grpc.max_receive_message_length", CLIENT_MESSAGE_BYTES_MAX),
                ("grpc.enable_http_proxy", 0),
                # An answer may take minutes, so calls of `Generate` have no timeout of their own.
                ("grpc.keepalive_time_ms", round(1000 * quiet_max_s)),
                ("grpc.keepalive_timeout_ms", round(1000 * _PING_TIMEOUT_S)),
                # What counts since gRPC has a timeout for every ping; its default is a minute.
                ("grpc.http2.ping_timeout_ms", round(1000 * _PING_TIMEOUT_S)),
                ("grpc.http2.max_pings_without_data", 0),
            ],
        )
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._admin = inference_pb2_grpc.AdminStub(self._channel)

    def generate(self, request: inference.GenerateRequest) -> Iterator[inference.GenerateResponse]:
        """The responses as they come; closing the iterator cancels the request."""
        call = self._inference.Generate(request, metadata=self._metadata)
        try:
            yield from call
        except grpc.RpcError as error:
            raise self._failure(error) from error
        finally:
            call.cancel()

    def model_info(self) -> inference.ModelInfoResponse:
        """What the cluster serves."""
        try:
            answer: inference.ModelInfoResponse = self._inference.ModelInfo(
                inference.ModelInfoRequest(), timeout=_STATUS_TIMEOUT_S, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise self._failure(error) from error
        return answer

    def cluster_status(self) -> inference.ClusterStatusResponse:
        """All workers with load and accounts."""
        try:
            answer: inference.ClusterStatusResponse = self._admin.ClusterStatus(
                inference.ClusterStatusRequest(),
                timeout=_STATUS_TIMEOUT_S,
                metadata=self._metadata,
            )
        except grpc.RpcError as error:
            raise self._failure(error) from error
        return answer

    def audit(self, worker_id: str) -> inference.AuditResponse:
        """Have one worker, or all of them (""), run every ledger check."""
        try:
            answer: inference.AuditResponse = self._admin.Audit(
                inference.AuditRequest(worker_id=worker_id),
                timeout=AUDIT_TIMEOUT_S + 2 * AUDIT_CALL_GRACE_S,
                metadata=self._metadata,
            )
        except grpc.RpcError as error:
            raise self._failure(error) from error
        return answer

    def traces(self, name: str, count_max: int) -> inference.TracesResponse:
        """One request by its id or trace id, or the latest ones ("")."""
        asked = inference.TracesRequest(name=name, count_max=count_max)
        try:
            answer: inference.TracesResponse = self._admin.Traces(
                asked, timeout=_STATUS_TIMEOUT_S, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise self._failure(error) from error
        return answer

    def add_worker(self, role: str) -> str:
        """Start one more worker; returns its name at once."""
        order = inference.AddWorkerRequest(role=role)
        try:
            answer = self._admin.AddWorker(
                order, timeout=_STATUS_TIMEOUT_S, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise self._failure(error) from error
        name: str = answer.worker_id
        return name

    def set_role(self, worker_id: str, role: str) -> None:
        """Have a worker used for something else."""
        order = inference.SetRoleRequest(worker_id=worker_id, role=role)
        try:
            self._admin.SetRole(order, timeout=_STATUS_TIMEOUT_S, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._failure(error) from error

    def remove_worker(self, worker_id: str, drain_s: float) -> bool:
        """Have a worker drained and ended; whether it had nothing left to do then."""
        order = inference.RemoveWorkerRequest(worker_id=worker_id, drain_s=drain_s)
        timeout_s = drain_s + 2 * STOP_TIMEOUT_S
        try:
            answer = self._admin.RemoveWorker(order, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._failure(error) from error
        drained: bool = answer.drained
        return drained

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._channel.close()

    def _failure(self, error: grpc.RpcError) -> CallFailed:
        code, details = error.code(), error.details()
        if code is grpc.StatusCode.UNAVAILABLE and not self._is_connected():
            return CallFailed(
                f"no kvferry cluster answers at {self._address}; `make serve` it, and give the "
                "files of its TLS if it has any"
            )
        return CallFailed(f"{code.name}: {details}")

    def _is_connected(self) -> bool:
        """Whether the router answers at all: its own UNAVAILABLE speaks of a worker."""
        try:
            grpc.channel_ready_future(self._channel).result(timeout=_CONNECT_TIMEOUT_S)
        except grpc.FutureTimeoutError:
            return False
        return True
