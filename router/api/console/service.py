"""The paths below `/console`: the page for everybody, its API for the operator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from kvferry.ids import WorkerId
from kvferry.limits import CONSOLE_REQUESTS_MAX
from router.api.console.access import ConsoleAccess
from router.api.console.page import GUARDS, ConsolePage
from router.api.console.parameters import check_names, tree_query, whole_number, yes_or_no
from router.api.console.recorder import ClusterRecorder
from router.api.console.request_answers import requests_out
from router.api.console.snapshot import cluster_out
from router.api.console.view_answers import handoffs_out, tree_out
from router.api.console.worker_views import WorkerViews

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from router.api.console.shapes import LiveOut, RequestsOut
    from router.api.door_settings import DoorSettings

_WORKER_CHARACTERS_MAX = 128
_REQUESTS_DEFAULT = 60
_EVERYTHING = -1
"""What `since` is to somebody who knows nothing."""
_NUMBER_MAX = 2**53 - 1
_API_HEADERS = {**GUARDS, "Cache-Control": "no-store"}


class ConsoleService:
    """Handlers of one router's console."""

    def __init__(self, settings: DoorSettings) -> None:
        self._router = settings.router
        self._clock = settings.clock
        self._page = ConsolePage()
        host = settings.router.config.router.host
        self._access = ConsoleAccess(settings.security, host)
        self.recorder = ClusterRecorder(settings.router, settings.clock)
        self._views = WorkerViews(settings.router.fleet, settings.clock)

    def add_routes(self, routes: web.UrlDispatcher) -> None:
        """Everything below /console."""
        routes.add_get("/console", self._redirect)
        routes.add_get("/console/api/cluster", self.cluster)
        routes.add_get("/console/api/workers/{worker}/tree", self.tree)
        routes.add_get("/console/api/handoffs", self.handoffs)
        routes.add_get("/console/api/requests", self.requests)
        routes.add_get("/console/{file:.*}", self._file)

    async def cluster(self, request: web.Request) -> web.Response:
        """GET /console/api/cluster: what the router knows now, and the samples after `since`."""
        self._access.check(request.headers)
        check_names(request.query, "since")
        since = whole_number(request.query, "since", _EVERYTHING, _EVERYTHING, _NUMBER_MAX)
        body: LiveOut = {
            **cluster_out(self._router, self._clock.now()),
            "history": self.recorder.history(since),
            "events": self.recorder.events(),
            "gone": self.recorder.gone(),
        }
        return _answer(body)

    async def requests(self, request: web.Request) -> web.Response:
        """GET /console/api/requests: those in flight, and those that ended last."""
        self._access.check(request.headers)
        check_names(request.query, "count")
        count = whole_number(request.query, "count", _REQUESTS_DEFAULT, 1, CONSOLE_REQUESTS_MAX)
        now_s = self._clock.now()
        body: RequestsOut = {
            "now_s": now_s,
            "requests": requests_out(self._router.log, count, now_s),
        }
        return _answer(body)

    async def tree(self, request: web.Request) -> web.Response:
        """GET /console/api/workers/{worker}/tree: the most used part of a worker's index."""
        self._access.check(request.headers)
        given = request.query
        check_names(given, "nodes", "depth", "tokens", "path", "text")
        query, is_text = tree_query(given), yes_or_no(given, "text")
        worker_id = WorkerId(request.match_info["worker"][:_WORKER_CHARACTERS_MAX])
        view = await self._views.tree(worker_id, query)
        return _answer(tree_out(worker_id, view, self._text_of if is_text else None))

    async def handoffs(self, request: web.Request) -> web.Response:
        """GET /console/api/handoffs: those that are not closed, of all workers."""
        self._access.check(request.headers)
        check_names(request.query)
        told = await self._views.handoffs()
        infos = (summary.info for summary in self._router.worker_summaries())
        names = {info.incarnation: info.worker_id for info in infos}
        return _answer(handoffs_out(told, names))

    def _text_of(self, tokens: Sequence[int]) -> str:
        """With special tokens, which are no part of what clients are shown."""
        data = b"".join(map(self._router.tokenizer.token_bytes, tokens))
        return data.decode("utf-8", "replace")

    async def _redirect(self, request: web.Request) -> web.Response:
        # Relative, so that it holds behind a proxy that serves this below some path.
        return web.Response(status=308, headers={"Location": "console/", **GUARDS})

    async def _file(self, request: web.Request) -> web.Response:
        return self._page.answer(request)


def _answer(body: Mapping[str, object]) -> web.Response:
    return web.json_response(body, headers=_API_HEADERS)
