"""Refuses gRPC calls without a key before any handler hears of them."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from grpc_health.v1 import health

from kvferry.errors import Forbidden, KvferryError
from kvferry.rpc_errors import abort
from router.api.admin_service import ADMIN_SERVICE
from router.api.security import ADMIN_TENANT

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from router.api.security import Security

_OPEN_SERVICES = frozenset({health.SERVICE_NAME})
"""Probes have no keys, and learn no more than whether this serves."""

_caller: ContextVar[str] = ContextVar("caller", default="")


def calling_tenant() -> str:
    """Whose key the call showed that is being handled; "" where none is needed."""
    return _caller.get()


def ends_requests_of() -> str | None:
    """Whose requests the call may end by their ids; None: anybody's, as the operator's may."""
    tenant = _caller.get()
    return None if tenant in ("", ADMIN_TENANT) else tenant


class KeyGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Every call needs a key, those of `Admin` one of the operator. Health is open to all."""

    def __init__(self, security: Security) -> None:
        self._security = security

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """gRPC runs this and the handler of a call in one context of variables."""
        service = handler_call_details.method.rpartition("/")[0].removeprefix("/")
        if service in _OPEN_SERVICES:
            return await continuation(handler_call_details)
        try:
            metadata = {
                key: value
                for key, value in handler_call_details.invocation_metadata
                if isinstance(value, str)
            }
            tenant = self._security.tenant_of(metadata)
            if service == ADMIN_SERVICE and tenant != ADMIN_TENANT:
                raise Forbidden(f"{ADMIN_SERVICE} needs a key of the tenant `{ADMIN_TENANT}`")
        except KvferryError as error:
            return _refusal(error)
        _caller.set(tenant)
        return await continuation(handler_call_details)


def _refusal(error: KvferryError) -> Any:
    """A handler that ends the call, whatever kind of call it is."""

    async def refuse(_: Any, context: Any) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)
