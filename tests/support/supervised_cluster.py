"""A cluster in one process under a real supervisor, whose members are objects instead of processes.

The router is a real `RouterActor` with its front doors, workers run the digest model: orders go the
whole way, from an operator's call to the last worker's end, without Ray.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast
from unittest.mock import patch

import grpc

from cluster.cluster_state import ClusterState
from cluster.configurations import Configurations
from cluster.launcher import FoundProcess, Launcher, MemberHandle, StartOutcome
from cluster.local_cluster import with_model_directory
from cluster.members import RouterSpec, members_of
from cluster.operations import Operations
from cluster.router_actor import RouterActor
from cluster.supervisor import Supervisor
from cluster.takeover import Beginning
from cluster.worker_process import WorkerProcess
from engine.model_directory import resolve_model
from kvferry.clock import MonotonicClock
from kvferry.config import to_mapping
from kvferry.rpc.v1 import inference_pb2 as inference
from kvferry.rpc.v1 import inference_pb2_grpc
from tests.support.digest_cluster import digest_workers
from tests.support.fake_members import MemoryStore
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from cluster.members import MemberSpec, WorkerSpec
    from kvferry.config import ClusterConfig

_LONG_S = 60.0


class SupervisedCluster(Launcher):
    """As a context manager: serves when entered."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = with_model_directory(config, resolve_model(config.model.path))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._contexts = ExitStack()
        clock = MonotonicClock()
        state = ClusterState(members_of(config), 0.1, clock, config.workers)
        beginning = Beginning(state, Configurations({0: config}, 0), 1)
        self.supervisor = Supervisor(beginning, self, MemoryStore(), clock)
        self.handles: list[MemberHandle] = []

    async def launch(self, spec: MemberSpec, launch: int, config: ClusterConfig) -> MemberHandle:
        """See `Launcher`."""
        made: MemberHandle
        of_process = with_model_directory(config, Path(self._config.model.path))
        if isinstance(spec, RouterSpec):
            control = Operations(self.supervisor)
            made = cast("MemberHandle", _Router(RouterActor(to_mapping(of_process), spec, control)))
        else:
            made = _Worker(of_process, spec)
        self.handles.append(made)
        return made

    async def living(self) -> list[FoundProcess]:
        """None but those that the supervisor knows."""
        return []

    async def has_room(self, spec: MemberSpec) -> bool:
        """See `Launcher`."""
        return True

    def __enter__(self) -> Self:
        self._contexts.enter_context(digest_workers())
        self._contexts.enter_context(patch("cluster.router_actor.configure_logging"))
        self._thread.start()
        self._running = asyncio.run_coroutine_threadsafe(self.supervisor.run(), self._loop)
        view = self.supervisor.view
        wait_until("a whole cluster", lambda: view().is_complete, _LONG_S, state=view)
        self.address = view().routers[0].address
        self._channel = self._contexts.enter_context(grpc.insecure_channel(self.address))
        self.admin = inference_pb2_grpc.AdminStub(self._channel)
        self.wait_for(*(info.worker_id for info in view().membership.workers))
        return self

    def __exit__(self, *exc: object) -> None:
        self._contexts.callback(self._loop.close)
        self._contexts.callback(self._thread.join, _LONG_S)
        self._contexts.callback(self._loop.call_soon_threadsafe, self._loop.stop)
        self._contexts.callback(self._running.result, _LONG_S)
        self._contexts.callback(self._await, self.supervisor.stop())
        self._contexts.close()

    def status(self) -> dict[str, inference.WorkerSummary]:
        """What the router says of each worker."""
        told = self.admin.ClusterStatus(inference.ClusterStatusRequest(), timeout=_LONG_S)
        return {worker.worker_id: worker for worker in told.workers}

    def wait_for(self, *worker_ids: str) -> None:
        """Until these and no others are in the cluster, and are reached."""

        def holds() -> bool:
            status = self.status()
            reached = {name for name, worker in status.items() if worker.reachable}
            return reached == set(status) == set(worker_ids)

        wait_until("these workers", holds, _LONG_S, state=self.status)

    def _await(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_LONG_S)


class _Router:
    """A router, without a process of its own."""

    def __init__(self, actor: RouterActor) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actor, name)

    async def wait_until_ended(self) -> None:
        await self._actor.wait_until_ended(_LONG_S)

    async def kill(self) -> None:
        """Its process is ours."""


class _Worker(MemberHandle):
    def __init__(self, config: ClusterConfig, spec: WorkerSpec) -> None:
        self._process = WorkerProcess(config, spec.worker_id, spec.role)
        self._ended = asyncio.Event()

    async def start(self) -> StartOutcome:
        return await asyncio.to_thread(self._process.start)

    async def wait_until_ended(self) -> None:
        await self._ended.wait()

    async def is_alive(self) -> bool:
        return self._process.is_alive()

    async def stop(self) -> None:
        await asyncio.to_thread(self._process.stop)
        self._ended.set()

    async def kill(self) -> None:
        assert self._ended.is_set(), "no worker has to be ended by force"
