"""Where the HTTP front door takes connections: no more than leaves the router file descriptors."""

from __future__ import annotations

import asyncio
import resource
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from ssl import SSLContext

CONNECTIONS_MAX = 16_384
"""Each takes some 5 KB while it is idle."""

_TLS_HANDSHAKE_S = 10.0

_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: 122\r\n"
    b"Retry-After: 1\r\nConnection: close\r\n\r\n"
    b'{"error": {"message": "connections: too many are open", '
    b'"type": "service_unavailable_error", "param": null, "code": null}}'
)


def connections_max() -> int:
    """Half of the descriptors that the process may have; the others are for workers and files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS_MAX if soft == resource.RLIM_INFINITY else min(CONNECTIONS_MAX, soft // 2)


class BoundedSite(web.BaseSite):
    """Listens at one address, and answers 503 to connections beyond `connections_max`.

    Who takes its time is dropped by the server that `runner` has: without a whole head of a
    request after the time for idle connections.
    """

    __slots__ = ("_address", "_connections_max")

    def __init__(
        self,
        runner: web.AppRunner,
        address: tuple[str, int],
        ssl_context: SSLContext | None,
        connections_max: int,
    ) -> None:
        super().__init__(runner, ssl_context=ssl_context)
        self._address = address
        self._connections_max = connections_max

    @property
    def name(self) -> str:
        """For logs of the library."""
        host, port = self._address
        return f"{'http' if self._ssl_context is None else 'https'}://{host}:{port}"

    async def start(self) -> None:
        """Raises `OSError` when the address cannot be bound."""
        await super().start()
        host, port = self._address
        self._server = await asyncio.get_running_loop().create_server(
            self._protocol,
            host,
            port,
            ssl=self._ssl_context,
            backlog=self._backlog,
            ssl_handshake_timeout=None if self._ssl_context is None else _TLS_HANDSHAKE_S,
        )

    def _protocol(self) -> asyncio.BaseProtocol:
        server = self._runner.server
        assert server is not None, "the runner is set up before its sites"
        if len(server.connections) < self._connections_max:
            return server()
        return _Refusal()


class _Refusal(asyncio.Protocol):
    """A connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(_REFUSAL)
        transport.close()
