"""The gRPC front door: inference, admin, standard health and reflection on one port."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
from typing import TYPE_CHECKING, Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvferry.errors import ConfigError
from kvferry.limits import CLIENT_MESSAGE_BYTES_MAX
from router.api.admin_service import ADMIN_SERVICE, AdminService
from router.api.inference_service import INFERENCE_SERVICE, InferenceService
from router.api.security_guard import KeyGuard

if TYPE_CHECKING:
    from router.api.door_settings import DoorSettings
    from router.api.security_tls import Tls
    from router.api.smg_service import SmgService
    from router.router import Router

_log = logging.getLogger(__name__)

_OPTIONS = (
    ("grpc.max_receive_message_length", CLIENT_MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", CLIENT_MESSAGE_BYTES_MAX),
    # Clients may ask as often as every 10 s whether a quiet stream still lives.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    # Gateways also ask whether a connection without any stream lives.
    ("grpc.keepalive_permit_without_calls", 1),
)


def server_options(*, shares_ports: bool) -> tuple[tuple[str, int], ...]:
    """Of the gRPC servers of all doors. Unless a port is to be shared with a successor, a second
    router must not silently take half of the calls."""
    return (*_OPTIONS, ("grpc.so_reuseport", int(shares_ports)))


_HEALTH_NAMES = ("", INFERENCE_SERVICE)


class FrontDoor:
    """A running server; made by `serve`."""

    def __init__(
        self, router: Router, server: Any, health_servicer: Any, smg: SmgService | None
    ) -> None:
        self._router = router
        self._server = server
        self._smg = smg
        self._health = health_servicer
        self._health_task = asyncio.create_task(self._publish_health())

    async def stop(self, grace_s: float | None = None) -> None:
        """Take no new calls, give running ones `grace_s`, then end them."""
        self._health_task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._health_task
        if self._smg is not None:
            self._smg.stop()
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)

    async def _publish_health(self) -> None:
        """SERVING while some worker that decodes can be reached."""
        changed = self._router.fleet.readiness_changed
        statuses = health_pb2.HealthCheckResponse
        while True:
            changed.clear()
            status = statuses.SERVING if self._router.is_ready else statuses.NOT_SERVING
            for name in _HEALTH_NAMES:
                await self._health.set(name, status)
            await changed.wait()


async def serve(settings: DoorSettings, address: tuple[str, int]) -> tuple[FrontDoor, int]:
    """Start to serve at (host, port); returns the bound port, which port 0 leaves to the system.

    Raises `ConfigError` naming `router.port` when the address cannot be bound.
    """
    router, security = settings.router, settings.security
    guards = [KeyGuard(security)] if security is not None and security.asks_for_keys else []
    options = server_options(shares_ports=settings.shares_ports)
    server = grpc.aio.server(interceptors=guards, options=options)
    health_servicer = health.aio.HealthServicer()
    services = [
        InferenceService(router, settings.metrics).handler(),
        AdminService(router, settings.control, settings.planner).handler(),
    ]
    names = [INFERENCE_SERVICE, ADMIN_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME]
    smg = _smg_service(settings)
    if smg is not None:
        services.append(smg.handler())
        names.append(smg.name)
    server.add_generic_rpc_handlers(services)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection(names, server)
    host, port = address
    bound_port = _bind(server, f"{host}:{port}", None if security is None else security.tls)
    await server.start()
    return FrontDoor(router, server, health_servicer, smg), bound_port


def _bind(server: Any, address: str, tls: Tls | None) -> int:
    try:
        if tls is None:
            bound_port: int = server.add_insecure_port(address)
        else:
            bound_port = server.add_secure_port(address, tls.grpc_credentials())
    except RuntimeError as error:
        raise ConfigError("router.port", f"cannot bind {address}: {error}") from error
    return bound_port


def _smg_service(settings: DoorSettings) -> SmgService | None:
    """The engine protocol of the smg gateway, where its message types are installed."""
    if importlib.util.find_spec("smg_grpc_proto") is None:
        _log.info("smg's engine protocol is not served: the extra `smg` is not installed")
        return None
    from router.api.smg_service import SmgService

    return SmgService(settings.router, settings.metrics)
