"""On whose account a gRPC call is, before any handler hears of it: its key's, or its port's."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from grpc_health.v1 import health

from kvferry.errors import Forbidden, KvferryError
from kvferry.router_config import ADMIN_TENANT
from kvferry.rpc_errors import abort
from kvferry.trace_context import TRACEPARENT, TRACESTATE, parse_traceparent
from router.api.admin_service import ADMIN_SERVICE
from router.api.security import TENANT_HEADER

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvferry.trace_context import TraceContext
    from router.api.security import Security

_OPEN_SERVICES = frozenset({health.SERVICE_NAME})
"""Probes have no keys, and learn no more than whether this serves."""

_caller: ContextVar[str] = ContextVar("caller", default="")


def calling_tenant() -> str:
    """Who makes the call that is being handled, by its key or its port; "" if nobody has to say."""
    return _caller.get()


def named_tenant(context: Any) -> str:
    """Whom the metadata of a call name as its tenant; "" if nobody."""
    return _metadata_value(context, TENANT_HEADER)


def calling_span(context: Any) -> TraceContext | None:
    """Of the trace that a call belongs to; None if its metadata name none."""
    header = _metadata_value(context, TRACEPARENT)
    return parse_traceparent(header, _metadata_value(context, TRACESTATE)) if header else None


def _metadata_value(context: Any, name: str) -> str:
    named = (value for key, value in context.invocation_metadata() if key == name)
    value = next(named, "")
    return value if isinstance(value, str) else ""


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


class OneAccount(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Every call is on the account of one tenant, whatever it shows."""

    def __init__(self, tenant: str) -> None:
        self._tenant = tenant

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """As `KeyGuard`'s."""
        _caller.set(self._tenant)
        return await continuation(handler_call_details)


def _refusal(error: KvferryError) -> Any:
    """A handler that ends the call, whatever kind of call it is."""

    async def refuse(_: Any, context: Any) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)
