"""The supervisor as a named, detached actor, which Ray starts again when its process has ended.

It is ready by itself: nobody has to call a new one for it to take over. A plain class of
coroutines; `ray_runtime` makes it an actor and gives it the launcher and the record.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING, Any, TypeVar

from cluster.operations import Operations
from cluster.supervisor import ClusterView, Supervisor
from cluster.takeover import begin
from kvferry.clock import MonotonicClock
from kvferry.config import config_from_mapping
from kvferry.errors import KvferryError
from kvferry.telemetry import configure_logging

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from cluster.cluster_record import RecordStore
    from cluster.launcher import Launcher
    from kvferry.membership import Role
    from router.cluster_control import RolloutReport, ScaleOutcome

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class SupervisorActor:
    """Hosts the supervisor of one cluster."""

    def __init__(
        self,
        config: Mapping[str, Any],
        make_launcher: Callable[[Mapping[str, Any]], Launcher],
        make_store: Callable[[], RecordStore],
        exit_process: Callable[[int], object] = os._exit,
    ) -> None:
        """`config`: what the cluster begins with; later its record says what it is like."""
        configure_logging("supervisor")
        self._config = config
        self._launcher = make_launcher(config)
        self._store = make_store()
        self._exit_process = exit_process
        self._begun = asyncio.get_running_loop().create_task(self._begin())
        self._begun.add_done_callback(self._exit_on_failure)
        self._run: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when there is a supervisor: it begins to start the members, or has found them.

        `wait_for_change` tells when they serve.
        """
        await self._started()

    async def view(self) -> ClusterView:
        """The cluster as it is now."""
        return (await self._started())[0].view()

    async def wait_for_change(self, seen: int, timeout_s: float) -> ClusterView:
        """See `Supervisor.wait_for_change`."""
        supervisor, _ = await self._started()
        return await supervisor.wait_for_change(seen, timeout_s)

    async def unreached_workers(self) -> tuple[str, ...]:
        """See `Supervisor.unreached_workers`."""
        supervisor, _ = await self._started()
        return await supervisor.unreached_workers()

    async def add_worker(self, role: Role) -> str | KvferryError:
        """See `Operations.add_worker`. What it raises is returned, as of the others."""
        _, operations = await self._started()
        return await _outcome(operations.add_worker(role))

    async def set_role(self, worker_id: str, role: Role) -> KvferryError | None:
        """See `Operations.set_role`."""
        _, operations = await self._started()
        return await _outcome(operations.set_role(worker_id, role))

    async def remove_worker(self, worker_id: str, drain_s: float) -> bool | KvferryError:
        """See `Operations.remove_worker`."""
        _, operations = await self._started()
        return await _outcome(operations.remove_worker(worker_id, drain_s))

    async def scale(self, role: Role, count: int, drain_s: float) -> ScaleOutcome | KvferryError:
        """See `Operations.scale`."""
        _, operations = await self._started()
        return await _outcome(operations.scale(role, count, drain_s))

    async def apply(
        self, config: Mapping[str, Any], drain_s: float
    ) -> RolloutReport | KvferryError:
        """See `Operations.apply`. Raises `ConfigError` for values that were not checked before."""
        _, operations = await self._started()
        return await _outcome(operations.apply(config_from_mapping(config), drain_s))

    async def restart(
        self, worker_ids: Sequence[str], drain_s: float
    ) -> RolloutReport | KvferryError:
        """See `Operations.restart`."""
        _, operations = await self._started()
        return await _outcome(operations.restart(worker_ids, drain_s))

    async def rollout(self) -> RolloutReport | KvferryError:
        """See `Operations.rollout`."""
        _, operations = await self._started()
        return await _outcome(operations.rollout())

    async def router_grace_s(self) -> float:
        """How long `stop` may wait for requests that run, in seconds."""
        supervisor, _ = await self._started()
        return supervisor.configs.current.router.stop_grace_s

    async def stop(self) -> None:
        """End every member."""
        supervisor, _ = await self._started()
        await supervisor.stop()

    async def _begin(self) -> tuple[Supervisor, Operations]:
        clock, store = MonotonicClock(), self._store
        config = config_from_mapping(self._config)
        beginning = await begin(await store.load(), config, self._launcher, clock)
        supervisor = Supervisor(beginning, self._launcher, store, clock)
        # Before anything is done: what it does now, its successor must know to be its own.
        await supervisor.recorder.save()
        operations = Operations(supervisor)
        self._run = asyncio.create_task(supervisor.run())
        self._run.add_done_callback(self._exit_on_failure)
        operations.go_on()
        return supervisor, operations

    def _exit_on_failure(self, task: asyncio.Task[Any]) -> None:
        """A supervisor that supervises no more must not look as if it did: its process ends, and
        Ray starts another one."""
        if task.cancelled() or task.exception() is None:
            return
        _log.critical("supervision failed; the process ends", exc_info=task.exception())
        self._exit_process(1)

    async def _started(self) -> tuple[Supervisor, Operations]:
        return await asyncio.shield(self._begun)


async def _outcome(order: Coroutine[None, None, _T]) -> _T | KvferryError:
    try:
        return await order
    except KvferryError as error:
        return error
