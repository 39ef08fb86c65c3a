"""The process of one router: its front doors, gRPC and HTTP, and the calls its supervisor makes.

A plain class of coroutines; `ray_runtime` makes it an actor, whose asyncio loop serves both.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.launcher import StartOutcome, StartRefused
from cluster.members import RouterInfo, RouterSpec
from kvferry.clock import MonotonicClock
from kvferry.config import config_from_mapping
from kvferry.errors import InvalidInput, KvferryError
from kvferry.limits import STOP_TIMEOUT_S
from kvferry.telemetry import configure_logging

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvferry.membership import Membership
    from router.api.grpc_server import FrontDoor
    from router.api.http_server import HttpFrontDoor
    from router.api.security import Security
    from router.router import Router

_log = logging.getLogger(__name__)

_GRACE_S = 0.5 * STOP_TIMEOUT_S
"""For streams that are nearly done; what is left of the stop's time is for closing."""


class RouterActor:
    """Hosts one router."""

    def __init__(self, config: Mapping[str, Any], spec: RouterSpec) -> None:
        configure_logging(spec.name)
        self._config = config_from_mapping(config)
        self._spec = spec
        self._stopped = asyncio.Event()
        self._router: Router | None = None
        self._doors: list[FrontDoor | HttpFrontDoor] = []
        self._security: Security | None = None

    async def start(self) -> StartOutcome:
        """Load the tokenizer and open the front doors."""
        # Imported here, because the supervisor imports this module and needs none of it.
        from router.api.grpc_server import serve
        from router.api.http_server import serve_http
        from router.api.request_metrics import RequestMetrics
        from router.api.security import Security
        from router.router import Router

        try:
            self._security = Security(self._config.router.security)
            self._security.start()
            directory = Path(self._config.model.path)
            clock = MonotonicClock()
            self._router = Router(self._config, directory, clock, random.Random())
            await self._router.start()
            metrics, host = RequestMetrics(self._router, clock), self._spec.host
            door, port = await serve(self._router, host, self._spec.port, self._security, metrics)
            self._doors.append(door)
            http_door, http_port = await serve_http(
                self._router, metrics, (host, self._spec.http_port), self._security
            )
            self._doors.append(http_door)
        except (KvferryError, OSError) as error:
            _log.error("cannot start", extra={"reason": str(error)})
            return StartRefused(str(error), for_good=isinstance(error, InvalidInput))
        return RouterInfo(self._spec.name, host, port, http_port, os.getpid())

    async def wait_until_ended(self) -> None:
        """Returns after `stop`; a caller of a process that dies gets Ray's error instead."""
        await self._stopped.wait()

    async def is_alive(self) -> bool:
        """True: that the loop answers is the progress asked for."""
        return self._router is not None

    async def set_membership(self, membership: Membership) -> None:
        """Replace what the router knows of the workers."""
        assert self._router is not None, "the supervisor tells membership after start"
        await self._router.set_membership(membership)

    async def reached_workers(self) -> tuple[str, ...]:
        """Those that answer."""
        assert self._router is not None, "asked after start"
        summaries = self._router.worker_summaries()
        return tuple(each.info.worker_id for each in summaries if each.is_reachable)

    async def stop(self) -> None:
        """Refuse new requests, end the running ones, close."""
        try:
            await asyncio.gather(*(door.stop(_GRACE_S) for door in self._doors))
            if self._security is not None:
                await self._security.stop()
        finally:
            try:
                if self._router is not None:
                    await self._router.stop()
            finally:
                self._stopped.set()
