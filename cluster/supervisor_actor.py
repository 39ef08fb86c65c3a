"""The supervisor as a named, detached actor: it lives until it is stopped or Ray ends.

Ray is private to the process that owns the cluster, so the supervisor ends with its owner. A plain
class of coroutines; `ray_runtime` makes it an actor and gives it the launcher.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING, Any, TypeVar

from cluster.cluster_state import ClusterState
from cluster.members import members_of
from cluster.supervisor import ClusterView, Supervisor
from kvferry.clock import MonotonicClock
from kvferry.config import config_from_mapping
from kvferry.errors import KvferryError
from kvferry.telemetry import configure_logging

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from cluster.launcher import Launcher
    from kvferry.membership import Role

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class SupervisorActor:
    """Hosts the supervisor of one cluster."""

    def __init__(
        self,
        config: Mapping[str, Any],
        make_launcher: Callable[[Mapping[str, Any]], Launcher],
        exit_process: Callable[[int], object] = os._exit,
    ) -> None:
        configure_logging("supervisor")
        self._config = config
        self._make_launcher = make_launcher
        self._exit_process = exit_process
        self._supervisor: Supervisor | None = None
        self._run: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to start the members; `wait_for_change` tells when they are there."""
        tree = config_from_mapping(self._config)
        clock = MonotonicClock()
        state = ClusterState(members_of(tree), tree.restart_backoff_s, clock, tree.workers)
        launcher, grace_s = self._make_launcher(self._config), tree.router.stop_grace_s
        self._supervisor = Supervisor(state, launcher, clock, grace_s)
        self._run = asyncio.create_task(self._supervisor.run())
        self._run.add_done_callback(self._exit_on_failure)

    async def view(self) -> ClusterView:
        """The cluster as it is now."""
        return self._started().view()

    async def wait_for_change(self, seen: int, timeout_s: float) -> ClusterView:
        """See `Supervisor.wait_for_change`."""
        return await self._started().wait_for_change(seen, timeout_s)

    async def unreached_workers(self) -> tuple[str, ...]:
        """See `Supervisor.unreached_workers`."""
        return await self._started().unreached_workers()

    async def add_worker(self, role: Role) -> str | KvferryError:
        """See `Supervisor.add_worker`. What it raises is returned, as of the next two."""
        return await _outcome(self._started().add_worker(role))

    async def set_role(self, worker_id: str, role: Role) -> KvferryError | None:
        """See `Supervisor.set_role`."""
        return await _outcome(self._started().set_role(worker_id, role))

    async def remove_worker(self, worker_id: str, drain_s: float) -> bool | KvferryError:
        """See `Supervisor.remove_worker`."""
        return await _outcome(self._started().remove_worker(worker_id, drain_s))

    async def router_grace_s(self) -> float:
        """How long `stop` may wait for requests that run, in seconds."""
        return config_from_mapping(self._config).router.stop_grace_s

    async def stop(self) -> None:
        """End every member."""
        await self._started().stop()

    def _exit_on_failure(self, run: asyncio.Task[None]) -> None:
        """A supervisor that supervises no more must not look as if it did: its callers see an
        actor that is gone."""
        if run.cancelled() or run.exception() is None:
            return
        _log.critical("supervision failed; the process ends", exc_info=run.exception())
        self._exit_process(1)

    def _started(self) -> Supervisor:
        assert self._supervisor is not None, "`start` is the first call"
        return self._supervisor


async def _outcome(order: Coroutine[None, None, _T]) -> _T | KvferryError:
    try:
        return await order
    except KvferryError as error:
        return error
