"""A blocking gRPC client of one or several routers, for the command line and the demo."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.client_replay import AnswerChanged, Replay
from cluster.client_security import ClientSecurity
from kvferry.errors import InvalidInput
from kvferry.limits import (
    AUDIT_CALL_GRACE_S,
    AUDIT_TIMEOUT_S,
    CLIENT_MESSAGE_BYTES_MAX,
    RECORD_SAVE_TIMEOUT_S,
    SESSION_CONNECT_TIMEOUT_S,
    STOP_TIMEOUT_S,
)
from kvferry.rpc.v1 import inference_pb2 as inference
from kvferry.rpc.v1 import inference_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

_STATUS_TIMEOUT_S = 10.0
_ORDER_TIMEOUT_S = _STATUS_TIMEOUT_S + RECORD_SAVE_TIMEOUT_S
"""Of one that is answered when it is on record."""
_CONNECT_TIMEOUT_S = 1.0

QUIET_MAX_S = 15.0
"""After so long without a word of the router, it is asked whether it lives. Above the 10 s that
its server allows as the shortest interval, so that lateness is not taken for impatience."""

_OF_NO_ROUTER = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
_NO_SECURITY = ClientSecurity()

_PING_TIMEOUT_S = 5.0
"""A router whose machine or process is gone without a word ends a call after 20 s."""


class CallFailed(Exception):
    """The router refused a call, or could not be reached. The message is for the user."""


class RouterLost(CallFailed):
    """A router is gone, or cannot serve what another one might."""

    def __init__(self, text: str, *, is_connected: bool) -> None:
        super().__init__(text)
        self.is_connected = is_connected


class _Router:
    """One router and the connection to it."""

    def __init__(self, address: str, quiet_max_s: float, security: ClientSecurity) -> None:
        self.address = address
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
                # How long an attempt to connect may take; its default is 20 s.
                ("grpc.min_reconnect_backoff_ms", round(1000 * SESSION_CONNECT_TIMEOUT_S)),
            ],
        )
        self.inference = inference_pb2_grpc.InferenceStub(self._channel)
        self.admin = inference_pb2_grpc.AdminStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def is_connected(self) -> bool:
        """Whether the router answers at all: its own UNAVAILABLE speaks of a worker."""
        try:
            self._health.Check(
                health_pb2.HealthCheckRequest(), timeout=_CONNECT_TIMEOUT_S, wait_for_ready=True
            )
        except grpc.RpcError as error:
            # Any other refusal came from the router.
            return error.code() not in _OF_NO_ROUTER
        return True

    def close(self) -> None:
        """Calls that run are cancelled."""
        self._channel.close()


class Client:
    """Calls of one router, or of the next one when it is gone. Use as a context manager."""

    def __init__(
        self,
        *addresses: str,
        quiet_max_s: float = QUIET_MAX_S,
        security: ClientSecurity = _NO_SECURITY,
    ) -> None:
        """`addresses` are of routers of one cluster, host:port, the one to be asked first before
        the others. Raises `InvalidInput` for files of `security` that cannot be used."""
        assert addresses, "a client needs a router"
        self._metadata = security.metadata
        self._routers = [_Router(address, quiet_max_s, security) for address in addresses]
        self._current = 0
        """The one that answered last."""

    def generate(self, request: inference.GenerateRequest) -> Iterator[inference.GenerateResponse]:
        """The responses as they come; closing the iterator cancels the request.

        With several routers an answer that breaks off goes on at the next one, at the token where
        it broke off.
        """
        if len(self._routers) == 1:
            yield from self._answer(self._routers[0], request)
            return
        request = _with_seed(request)
        replay = Replay(request.sampling.n or 1)
        tries, reached = 0, 0
        while True:
            router = self._routers[self._current]
            try:
                for response in self._answer(router, request):
                    yield from replay.fresh(response)
            except RouterLost as lost:
                if replay.is_complete:
                    return
                tries = 1 if replay.progress > reached else tries + 1
                reached = replay.progress
                if tries > len(self._routers):
                    raise CallFailed(str(lost)) from lost
            except AnswerChanged as changed:
                problem = f"the answer broke off, and {router.address} answers otherwise: {changed}"
                raise CallFailed(problem) from changed
            else:
                yield from replay.rest()
                return
            self._turn_from(router)
            replay.begin_again()

    def model_info(self) -> inference.ModelInfoResponse:
        """What the cluster serves."""
        request = inference.ModelInfoRequest()
        answer: inference.ModelInfoResponse = self._ask(
            lambda router: router.inference.ModelInfo(
                request, timeout=_STATUS_TIMEOUT_S, metadata=self._metadata
            )
        )
        return answer

    def cluster_status(self) -> inference.ClusterStatusResponse:
        """All workers with load and accounts."""
        request = inference.ClusterStatusRequest()
        answer: inference.ClusterStatusResponse = self._ask(
            lambda router: router.admin.ClusterStatus(
                request, timeout=_STATUS_TIMEOUT_S, metadata=self._metadata
            )
        )
        return answer

    def audit(self, worker_id: str) -> inference.AuditResponse:
        """Have one worker, or all of them (""), run every ledger check."""
        request = inference.AuditRequest(worker_id=worker_id)
        timeout_s = AUDIT_TIMEOUT_S + 2 * AUDIT_CALL_GRACE_S
        answer: inference.AuditResponse = self._ask(
            lambda router: router.admin.Audit(request, timeout=timeout_s, metadata=self._metadata)
        )
        return answer

    def traces(self, name: str, count_max: int) -> inference.TracesResponse:
        """One request by its id or trace id, or the latest ones ("")."""
        asked = inference.TracesRequest(name=name, count_max=count_max)
        answer: inference.TracesResponse = self._ask(
            lambda router: router.admin.Traces(
                asked, timeout=_STATUS_TIMEOUT_S, metadata=self._metadata
            )
        )
        return answer

    def plans(self, count: int) -> inference.PlansResponse:
        """The last looks of the planner, the latest first."""
        asked = inference.PlansRequest(count=count)
        answer: inference.PlansResponse = self._ask(
            lambda router: router.admin.Plans(
                asked, timeout=_STATUS_TIMEOUT_S, metadata=self._metadata
            )
        )
        return answer

    def add_worker(self, role: str) -> str:
        """Start one more worker; returns its name at once."""
        order = inference.AddWorkerRequest(role=role)
        answer = self._order(
            lambda router: router.admin.AddWorker(
                order, timeout=_STATUS_TIMEOUT_S, metadata=self._metadata
            )
        )
        name: str = answer.worker_id
        return name

    def set_role(self, worker_id: str, role: str) -> None:
        """Have a worker used for something else."""
        order = inference.SetRoleRequest(worker_id=worker_id, role=role)
        self._order(
            lambda router: router.admin.SetRole(
                order, timeout=_STATUS_TIMEOUT_S, metadata=self._metadata
            )
        )

    def remove_worker(self, worker_id: str, drain_s: float) -> bool:
        """Have a worker drained and ended; whether it had nothing left to do then."""
        order = inference.RemoveWorkerRequest(worker_id=worker_id, drain_s=drain_s)
        timeout_s = drain_s + 2 * STOP_TIMEOUT_S
        answer = self._order(
            lambda router: router.admin.RemoveWorker(
                order, timeout=timeout_s, metadata=self._metadata
            )
        )
        drained: bool = answer.drained
        return drained

    def scale(self, role: str, count: int, drain_s: float) -> inference.ScaleResponse:
        """Have so many workers of a role; who comes and who goes."""
        try:
            order = inference.ScaleRequest(role=role, count=count, drain_s=drain_s)
        except ValueError as error:
            raise InvalidInput("count", str(error)) from error
        answer: inference.ScaleResponse = self._order(
            lambda router: router.admin.Scale(
                order, timeout=_ORDER_TIMEOUT_S, metadata=self._metadata
            )
        )
        return answer

    def apply(self, config_json: str, drain_s: float) -> inference.RolloutStatus:
        """Begin to run under another configuration."""
        order = inference.ApplyRequest(config=config_json, drain_s=drain_s)
        answer: inference.RolloutStatus = self._order(
            lambda router: router.admin.Apply(
                order, timeout=_ORDER_TIMEOUT_S, metadata=self._metadata
            )
        )
        return answer

    def restart(self, worker_ids: Sequence[str], drain_s: float) -> inference.RolloutStatus:
        """Begin to replace workers, all of them if none is named."""
        order = inference.RestartRequest(worker_ids=worker_ids, drain_s=drain_s)
        answer: inference.RolloutStatus = self._order(
            lambda router: router.admin.Restart(
                order, timeout=_ORDER_TIMEOUT_S, metadata=self._metadata
            )
        )
        return answer

    def rollout(self) -> inference.RolloutStatus:
        """How far the last rollout is."""
        request = inference.RolloutRequest()
        answer: inference.RolloutStatus = self._ask(
            lambda router: router.admin.Rollout(
                request, timeout=_STATUS_TIMEOUT_S, metadata=self._metadata
            )
        )
        return answer

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for router in self._routers:
            router.close()

    def _answer(
        self, router: _Router, request: inference.GenerateRequest
    ) -> Iterator[inference.GenerateResponse]:
        """Raises `CallFailed`, and `RouterLost` where another router may do better."""
        call = router.inference.Generate(request, metadata=self._metadata)
        try:
            yield from call
        except grpc.RpcError as error:
            raise _failure(router, error) from error
        finally:
            call.cancel()

    def _ask(self, call: Callable[[_Router], Any]) -> Any:
        """Of the first router that can be reached; what is asked may be asked twice."""
        tries = 0
        while True:
            router = self._routers[self._current]
            try:
                return call(router)
            except grpc.RpcError as error:
                tries += 1
                failure = _failure(router, error)
                is_lost = isinstance(failure, RouterLost) and not failure.is_connected
                if not is_lost or tries == len(self._routers):
                    raise failure from error
            self._turn_from(router)

    def _order(self, call: Callable[[_Router], Any]) -> Any:
        """Once, of the first router that can be reached: twice might be one too many."""
        for _ in self._routers[1:]:
            router = self._routers[self._current]
            if router.is_connected():
                break
            self._turn_from(router)
        router = self._routers[self._current]
        try:
            return call(router)
        except grpc.RpcError as error:
            raise _failure(router, error) from error

    def _turn_from(self, router: _Router) -> None:
        """To the next one, unless another thread has turned already."""
        if self._routers[self._current] is router:
            self._current = (self._current + 1) % len(self._routers)


def _with_seed(request: inference.GenerateRequest) -> inference.GenerateRequest:
    """One whose answer is the same whenever it is asked for."""
    if request.sampling.HasField("seed"):
        return request
    seeded = inference.GenerateRequest()
    seeded.CopyFrom(request)
    seeded.sampling.seed = secrets.randbits(64)
    return seeded


def _failure(router: _Router, error: grpc.RpcError) -> CallFailed:
    code, details = error.code(), error.details()
    if code is not grpc.StatusCode.UNAVAILABLE:
        return CallFailed(f"{code.name}: {details}")
    if router.is_connected():
        return RouterLost(f"{code.name}: {details}", is_connected=True)
    return RouterLost(
        f"no kvferry cluster answers at {router.address}; `make serve` it, and give the "
        "files of its TLS if it has any",
        is_connected=False,
    )
