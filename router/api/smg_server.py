"""A gRPC port for the smg gateway alone, which shows its engines no key and no certificate.

Only its engine protocol is here, on the account of one tenant. Who may reach the port is a matter
of the network.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import grpc.aio

from kvferry.errors import ConfigError
from router.api.grpc_server import server_options
from router.api.security_guard import OneAccount

if TYPE_CHECKING:
    from kvferry.router_config import SmgConfig
    from router.api.door_settings import DoorSettings
    from router.api.smg_service import SmgService


class SmgDoor:
    """A running server; made by `serve_smg`."""

    def __init__(self, server: Any, service: SmgService) -> None:
        self._server = server
        self._service = service

    async def stop(self, grace_s: float | None = None) -> None:
        """Take no new calls, give running ones `grace_s`, then end them."""
        self._service.stop()
        await self._server.stop(grace_s)


async def serve_smg(settings: DoorSettings, config: SmgConfig) -> SmgDoor | None:
    """Start to serve, if a port is set. Whatever `settings.security` says, anybody may ask.

    Raises `ConfigError` naming `router.smg.port` without the protocol's package, and when the
    address cannot be bound.
    """
    if config.port == 0:
        return None
    if importlib.util.find_spec("smg_grpc_proto") is None:
        raise ConfigError("router.smg.port", "needs the extra `smg`: pip install 'kvferry[smg]'")
    from router.api.smg_service import SmgService

    service = SmgService(settings.router, settings.metrics)
    options = server_options(shares_ports=settings.shares_ports)
    server = grpc.aio.server(interceptors=[OneAccount(config.tenant)], options=options)
    server.add_generic_rpc_handlers([service.handler()])
    address = f"{config.host}:{config.port}"
    try:
        server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError("router.smg.port", f"cannot bind {address}: {error}") from error
    await server.start()
    return SmgDoor(server, service)
