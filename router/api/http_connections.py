"""The connections of the HTTP front door: no more than leaves the router file descriptors, and what
is said to those that do not speak HTTP."""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import TYPE_CHECKING

from aiohttp import http_exceptions, web

from router.api.http_errors import HttpRefusal
from router.api.http_failures import error_response, library_refusal, server_fault

if TYPE_CHECKING:
    from ssl import SSLContext

_log = logging.getLogger(__name__)

_KEEP_ALIVE_S = 75.0
"""An idle connection is kept longer than the minute after which common proxies drop theirs: who
closes first must not be the side that the next request is under way to."""

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

    __slots__ = ("_address", "_connections_max", "_shares_port")

    def __init__(
        self,
        runner: web.AppRunner,
        address: tuple[str, int],
        ssl_context: SSLContext | None,
        connections_max: int,
        *,
        shares_port: bool = False,
    ) -> None:
        """`shares_port`: with a router that takes this one's place."""
        super().__init__(runner, ssl_context=ssl_context)
        self._address = address
        self._connections_max = connections_max
        self._shares_port = shares_port

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
            reuse_port=self._shares_port,
            ssl_handshake_timeout=None if self._ssl_context is None else _TLS_HANDSHAKE_S,
        )

    def _protocol(self) -> asyncio.BaseProtocol:
        server = self._runner.server
        assert server is not None, "the runner is set up before its sites"
        if len(server.connections) < self._connections_max:
            return _Connection(
                server,
                loop=asyncio.get_running_loop(),
                access_log=None,  # type: ignore[arg-type] # none, as the library's own sites pass
                keepalive_timeout=_KEEP_ALIVE_S,
                # What a few bytes may grow to has no bound; nobody compresses prompts.
                auto_decompress=False,
            )
        return _Refusal()


class _Connection(web.RequestHandler):
    """Says in the API's own form what the library refuses before there is a request."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The last answer of a connection. `exc`: what the bytes that came are not."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun; nothing can be told any more")
        if isinstance(exc, http_exceptions.HttpProcessingError):
            refusal = self._not_http(exc)
            _log.info("no HTTP", extra={"peer": request.remote, "reason": str(refusal)})
            response = error_response(refusal)
        else:
            response = error_response(server_fault(f"a connection failed with {status}"))
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer. Some refusals come before any handler could put them into words."""
        if isinstance(resp, web.HTTPException):
            resp = library_refusal(request, resp)
        return await super().finish_response(request, resp, start_time)

    def _not_http(self, error: http_exceptions.HttpProcessingError) -> HttpRefusal:
        """What is wrong, without the bytes that are."""
        if isinstance(error, http_exceptions.LineTooLong):
            most = self.max_field_size
            problem = f"request: its first line or a header has more than {most} bytes"
            return HttpRefusal(431, "request_header_fields_too_large", problem)
        if isinstance(error, http_exceptions.InvalidURLError):
            return HttpRefusal(400, "invalid_http", "request: its target is no URL")
        reason = error.message.partition(":")[0].strip()
        return HttpRefusal(400, "invalid_http", f"request: is not HTTP/1.1: {reason}")


class _Refusal(asyncio.Protocol):
    """A connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(_REFUSAL)
        transport.close()
