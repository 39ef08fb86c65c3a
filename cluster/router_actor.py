"""The process of one router: its front doors, gRPC and HTTP, and the calls its supervisor makes.

A plain class of coroutines; `ray_launcher` makes it an actor, whose asyncio loop serves both.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import random
from typing import TYPE_CHECKING, Any

from cluster.launcher import StartOutcome, StartRefused
from cluster.members import ROUTER_PORTS, RouterInfo, RouterSpec
from kvferry.addresses import LOOPBACK, host_to_announce, host_to_bind
from kvferry.clock import MonotonicClock
from kvferry.config import config_from_mapping
from kvferry.errors import ConfigError, InvalidInput, KvferryError
from kvferry.ids import WorkerId
from kvferry.limits import STOP_TIMEOUT_S
from kvferry.planner_config import PlannerMode
from kvferry.telemetry import configure_logging

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cluster.members import MemberInfo
    from cluster.planner_loop import PlannerLoop
    from kvferry.clock import Clock
    from kvferry.config import ClusterConfig
    from kvferry.membership import Membership
    from kvferry.router_config import SmgConfig
    from router.api.door_settings import DoorSettings
    from router.api.grpc_server import FrontDoor
    from router.api.http_server import HttpFrontDoor
    from router.api.request_metrics import RequestMetrics
    from router.api.security import Security
    from router.api.smg_server import SmgDoor
    from router.cluster_control import ClusterControl
    from router.router import Router
    from router.span_export import RequestExport

_log = logging.getLogger(__name__)

_CLOSING_S = 0.1 * STOP_TIMEOUT_S
"""For clients to read that they get no more; what is left of the stop's time is for the rest."""


class RouterActor:
    """Hosts one router."""

    def __init__(
        self,
        config: Mapping[str, Any],
        spec: RouterSpec,
        control: ClusterControl,
        node_address: Callable[[], str] = lambda: LOOPBACK,
        ask_resources: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`control` carries out what operators order, and the planner, which tells `ask_resources`
        for how many workers there shall be machines. `node_address` is asked in this process."""
        self._ask_resources = ask_resources
        configure_logging(spec.name)
        address = node_address()
        # As it is from here on: who may look at the console depends on what is bound.
        self._config = _bound_to(config_from_mapping(config), host_to_bind(spec.host, address))
        self._announced_host = host_to_announce(spec.host, address)
        self._spec = spec
        self._control = control
        self._stopped = asyncio.Event()
        self._starting: asyncio.Task[StartOutcome] | None = None
        self._metrics: RequestMetrics | None = None
        self._router: Router | None = None
        self._doors: list[FrontDoor | HttpFrontDoor | SmgDoor] = []
        self._security: Security | None = None
        self._planner: PlannerLoop | None = None
        self._export: RequestExport | None = None

    async def start(self) -> StartOutcome:
        """Load the tokenizer and open the front doors. Whoever asks again is told the same.

        A successor opens them when it first knows workers: until then its predecessor serves.
        """
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        # A supervisor that is gone takes its call with it, not the start.
        return await asyncio.shield(self._starting)

    async def describe(self) -> MemberInfo | None:
        """What `start` told; None: it has not ended yet, or it refused."""
        if self._starting is None or not self._starting.done():
            return None
        outcome = self._starting.result()
        return None if isinstance(outcome, StartRefused) else outcome

    async def _start(self) -> StartOutcome:
        # Imported here, because the supervisor imports this module and needs none of it.
        from engine.model_directory import resolve_model
        from router.api.request_metrics import RequestMetrics
        from router.api.security import Security
        from router.router import Router
        from router.span_export import open_export

        try:
            self._security = Security(self._config.router.security)
            self._security.start()
            # A node without workers has to make the model ready itself, for its tokenizer.
            directory = await asyncio.to_thread(resolve_model, self._config.model.path)
            clock = MonotonicClock()
            self._router = Router(self._config, directory, clock, random.Random())
            await self._router.start()
            self._export = open_export(self._config.tracing, self._config.model.served_name)
            if self._export is not None:
                self._router.log.on_end.append(self._export.note)
            self._metrics = RequestMetrics(self._router, clock)
            self._planner = self._make_planner(self._router, clock)
            port, http_port = self._spec.port, self._spec.http_port
            if not self._spec.is_successor:
                port, http_port = await self._open_doors(self._door_settings())
        except (KvferryError, OSError) as error:
            _log.error("cannot start", extra={"reason": str(error)})
            return StartRefused(str(error), for_good=isinstance(error, InvalidInput))
        return RouterInfo(self._spec.name, self._announced_host, port, http_port, os.getpid())

    def _door_settings(self) -> DoorSettings:
        from router.api.door_settings import DoorSettings

        assert self._router is not None, "asked after start"
        assert self._metrics is not None, "asked after start"
        return DoorSettings(
            self._router,
            self._metrics,
            self._security,
            self._control,
            self._planner,
            # Several on one node look for free ports, and must see which are taken.
            shares_ports=self._spec.port_tries == 1,
        )

    async def _open_doors(self, settings: DoorSettings) -> tuple[int, int]:
        """Returns the ports of gRPC and HTTP. Raises `ConfigError` naming the one that is taken."""
        last = self._spec.port_tries - 1
        for attempt in range(last):
            try:
                return await self._open_doors_at(settings, attempt)
            except ConfigError as error:
                _log.info("ports are taken", extra={"reason": str(error)})
                await self._close_doors()
        return await self._open_doors_at(settings, last)

    async def _open_doors_at(self, settings: DoorSettings, attempt: int) -> tuple[int, int]:
        from router.api.grpc_server import serve
        from router.api.http_server import serve_http
        from router.api.smg_server import serve_smg

        host = self._config.router.host
        port, http_port = self._spec.ports_of(attempt)
        door, bound_port = await serve(settings, (host, port))
        self._doors.append(door)
        http_door, bound_http_port = await serve_http(settings, (host, http_port))
        self._doors.append(http_door)
        smg_door = await serve_smg(settings, self._smg(attempt))
        if smg_door is not None:
            self._doors.append(smg_door)
        return bound_port, bound_http_port

    def _smg(self, attempt: int) -> SmgConfig:
        """As far from the configured port as the other ports are from theirs."""
        smg, configured = self._config.router.smg, self._config.router.port
        shift = self._spec.port - configured if configured else 0
        port = smg.port and smg.port + shift + ROUTER_PORTS * attempt
        return dataclasses.replace(smg, port=port)

    def _make_planner(self, router: Router, clock: Clock) -> PlannerLoop | None:
        """At work already; None where it is off."""
        from cluster.planner_loop import PlannerLoop

        if self._config.planner.mode is PlannerMode.OFF:
            return None
        planner = PlannerLoop(self._config, router, self._control, clock, self._ask_resources)
        planner.start()
        return planner

    async def wait_until_ended(self, timeout_s: float) -> bool:
        """True after `stop`, False after `timeout_s`; a caller of a process that dies gets Ray's
        error instead."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._stopped.wait()
        return self._stopped.is_set()

    async def is_alive(self) -> bool:
        """True: that the loop answers is the progress asked for."""
        return self._router is not None

    async def set_membership(self, membership: Membership) -> None:
        """Replace what the router knows of the workers."""
        assert self._router is not None, "the supervisor tells membership after start"
        await self._router.set_membership(membership)
        if not self._doors and not self._stopped.is_set():
            await self._open_doors(self._door_settings())

    async def reached_workers(self) -> tuple[str, ...]:
        """Those that answer."""
        assert self._router is not None, "asked after start"
        summaries = self._router.worker_summaries()
        return tuple(each.info.worker_id for each in summaries if each.is_reachable)

    async def has_work_at(self, worker_id: str) -> bool:
        """See `router.draining`."""
        from router.draining import has_work_at

        assert self._router is not None, "asked after start"
        return await has_work_at(self._router.fleet, WorkerId(worker_id))

    async def retire(self, grace_s: float) -> None:
        """Close the doors to new calls, which its successor takes, and let running ones end.

        What has not ended after `grace_s` is told by `stop`, which is called next, or its client
        sees the connection end.
        """
        await asyncio.gather(*(door.stop(grace_s) for door in self._doors))

    async def stop(self) -> None:
        """Refuse new requests, let running ones end or tell their clients why not, close."""
        # The last of these first, each of them even if another one fails.
        async with contextlib.AsyncExitStack() as steps:
            steps.callback(self._stopped.set)
            if self._export is not None:
                steps.push_async_callback(asyncio.to_thread, self._export.close)
            if self._router is not None:
                steps.push_async_callback(self._router.stop)
            if self._security is not None:
                steps.push_async_callback(self._security.stop)
            steps.push_async_callback(self._close_doors)
            if self._planner is not None:
                steps.push_async_callback(self._planner.stop)
            if self._router is not None:
                # Behind open doors: whoever asks meanwhile is told when to ask again.
                await self._router.wind_down(self._config.router.stop_grace_s)

    async def _close_doors(self) -> None:
        doors, self._doors = self._doors, []
        await asyncio.gather(*(door.stop(_CLOSING_S) for door in doors))


def _bound_to(config: ClusterConfig, host: str) -> ClusterConfig:
    return dataclasses.replace(config, router=dataclasses.replace(config.router, host=host))
