"""The HTTP front door: the OpenAI API, probes, metrics and its own description, on one port."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from kvferry.errors import ConfigError, WorkerUnavailable
from kvferry.limits import CLIENT_MESSAGE_BYTES_MAX
from router.api.cluster_metrics import ClusterMetrics
from router.api.console.service import ConsoleService
from router.api.http_connections import BoundedSite, connections_max
from router.api.http_failures import answer_failures
from router.api.index_metrics import IndexMetrics
from router.api.open_api import describe_api
from router.api.openai_service import OpenAiService

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from prometheus_client import Metric

    from router.api.door_settings import DoorSettings
    from router.api.request_metrics import RequestMetrics
    from router.router import Router

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_CANCEL_S = 1.0
"""For handlers to end once they are cancelled."""


class HttpFrontDoor:
    """A running server; made by `serve_http`."""

    def __init__(self, runner: web.AppRunner, site: web.BaseSite, calls: CallCount) -> None:
        self._runner = runner
        self._site = site
        self._calls = calls
        self._is_open = True

    async def stop(self, grace_s: float | None = None) -> None:
        """Take no new calls, give running ones `grace_s`, then end them. May be called again."""
        if self._is_open:
            self._is_open = False
            self._calls.are_last = True
            await self._site.stop()
        if grace_s is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._calls.none_left.wait(), grace_s)
        await self._runner.cleanup()


class CallCount:
    """How many calls run now."""

    def __init__(self) -> None:
        self.are_last = False
        """Clients are to open new connections for further calls."""
        self.none_left = asyncio.Event()
        self.none_left.set()
        self._running = 0

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """While inside, one more."""
        self._running += 1
        self.none_left.clear()
        try:
            yield
        finally:
            self._running -= 1
            if self._running == 0:
                self.none_left.set()


async def serve_http(settings: DoorSettings, address: tuple[str, int]) -> tuple[HttpFrontDoor, int]:
    """Start to serve at (host, port); returns the bound port, which port 0 leaves to the system.

    Where keys are asked for, probes are open all the same.
    Raises `ConfigError` naming `router.http.port` when the address cannot be bound.
    """
    router, metrics, security = settings.router, settings.metrics, settings.security
    calls = CallCount()
    app = web.Application(
        client_max_size=CLIENT_MESSAGE_BYTES_MAX, middlewares=[_counted(calls), answer_failures]
    )
    OpenAiService(router, metrics, security).add_routes(app.router)
    _Probes(router, metrics).add_routes(app.router)
    if router.config.router.console.enabled:
        console = ConsoleService(settings)
        console.add_routes(app.router)
        app.cleanup_ctx.append(console.recorder.running)
    # A client that goes away cancels its handler.
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=_CANCEL_S)
    await runner.setup()
    tls = None if security is None else security.tls
    ssl_context = None if tls is None else tls.context
    site = BoundedSite(
        runner, address, ssl_context, connections_max(), shares_port=settings.shares_ports
    )
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        host, port = address
        problem = f"cannot bind {host}:{port}: {error.strerror}"
        raise ConfigError("router.http.port", problem) from error
    return HttpFrontDoor(runner, site, calls), runner.addresses[0][1]


class _Read(Collector):
    """A registry as it was."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


class _Probes:
    """What machines ask."""

    def __init__(self, router: Router, metrics: RequestMetrics) -> None:
        self._router = router
        self._registry = metrics.registry
        self._registry.register(ClusterMetrics(router))
        self._registry.register(IndexMetrics(router.fleet))
        self._description = describe_api()

    def add_routes(self, routes: web.UrlDispatcher) -> None:
        routes.add_get("/health", self._health)
        routes.add_get("/ready", self._ready)
        routes.add_get("/metrics", self._metrics)
        routes.add_get("/openapi.json", self._open_api)

    async def _health(self, request: web.Request) -> web.Response:
        """That the event loop answers is what is asked."""
        return web.json_response({"status": "ok"})

    async def _ready(self, request: web.Request) -> web.Response:
        if not self._router.is_ready:
            raise WorkerUnavailable("no worker that decodes can be reached")
        return web.json_response({"status": "ok"})

    async def _metrics(self, request: web.Request) -> web.Response:
        """As OpenMetrics, with exemplars, for whoever asks for that."""
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        # What is told is read here, where it is written, and put into text beside the event loop:
        # that is most of the work.
        read = _Read(list(self._registry.collect()))
        body = await asyncio.to_thread(encode, read)
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _open_api(self, request: web.Request) -> web.Response:
        return web.json_response(self._description)


def _counted(calls: CallCount) -> Callable[..., Awaitable[web.StreamResponse]]:
    @web.middleware
    async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
        with calls.one():
            response = await handler(request)
            if calls.are_last:
                response.force_close()
            return response

    return count
