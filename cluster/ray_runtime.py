"""Every call of Ray that kvferry makes.

Two halves: for the process that owns a cluster, `start_ray` / `stop_ray` / `start_supervisor`;
for the supervisor, `RayLauncher`, which turns Ray's errors into `MemberEnded`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import threading
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from cluster.launcher import Launcher, MemberEnded, MemberHandle, StartOutcome
from cluster.members import MemberSpec, RouterSpec, WorkerSpec
from cluster.process_census import MARK
from cluster.router_actor import RouterActor
from cluster.supervisor_actor import SupervisorActor
from cluster.worker_actor import WorkerActor
from kvferry.config import to_mapping
from kvferry.errors import KvferryError, WorkerUnavailable
from kvferry.limits import OBJECT_STORE_BYTES, STOP_TIMEOUT_S, WORKER_START_TIMEOUT_S
from router.cluster_control import ClusterControl

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from pathlib import Path

    from cluster.supervisor import ClusterView
    from kvferry.config import ClusterConfig
    from kvferry.membership import Membership, Role

_NAMESPACE = "kvferry"
_SUPERVISOR_NAME = "supervisor"
_CALLS_AT_ONCE = 1000
"""Of an actor: watchers pend for as long as the process lives, and must not block others."""

_WORKER_THREADS = 4
"""Of a worker's actor: one each for a pending watcher, a health call and `stop`, and a spare."""

_STOP_ALL_TIMEOUT_S = 3 * STOP_TIMEOUT_S
"""Of a supervisor, after the routers' grace: one each for the routers and the workers, and one for
the calls themselves."""

_RAY_ENVIRONMENT = {
    # Ray names its processes by overwriting their arguments; without this, the environment that
    # Linux shows of them too, and with it the mark of `process_census`.
    "SPT_NOENV": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray turns authentication on by itself where it finds a token file. Every process of a
    # cluster must agree, so it is set for all of them, here, before the first one starts.
    "RAY_AUTH_MODE": "disabled",
    # Ray runs actors at nice 15, which suits batches of work: whatever else wakes up on the
    # machine, Ray's own daemons and this process among it, would go before a decode step.
    "RAY_worker_niceness": "0",
}

_T = TypeVar("_T")


def start_ray(directory: Path, address: str, cpus: float) -> None:
    """Start Ray's own processes, private to this one: they end when this process ends.

    `directory` gets sockets and logs; its path must be short, sockets allow 107 characters.
    `cpus` is what members may reserve together; it is accounting, not a limit.
    """
    handler = signal.getsignal(signal.SIGTERM)
    os.environ.update(_RAY_ENVIRONMENT)  # Ray reads these switches from nowhere else.
    os.environ[MARK] = str(directory)
    try:
        ray.init(
            address="local",
            namespace=_NAMESPACE,
            num_cpus=math.ceil(cpus),
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            configure_logging=True,
            logging_level=logging.ERROR,
            log_to_driver=False,
            _node_ip_address=address,
            _temp_dir=str(directory),
        )
    finally:
        # Ray's servers have it by now and hand it on; what else we start is no part of this.
        del os.environ[MARK]
    if threading.current_thread() is threading.main_thread():
        # Ray puts its own handler there, which ends the process without stopping the members.
        signal.signal(signal.SIGTERM, handler)


def stop_ray() -> None:
    """End Ray's processes and every actor with them."""
    ray.shutdown()


class SupervisorHandle:
    """The supervisor, seen from the process that owns the cluster. Calls block."""

    def __init__(self, actor: Any, router_grace_s: float) -> None:
        self._actor = actor
        self._stop_timeout_s = router_grace_s + _STOP_ALL_TIMEOUT_S

    def view(self) -> ClusterView:
        """The cluster as it is now."""
        view: ClusterView = _get(self._actor.view.remote(), STOP_TIMEOUT_S)
        return view

    def wait_for_change(self, seen: int, timeout_s: float) -> ClusterView:
        """See `Supervisor.wait_for_change`."""
        reference = self._actor.wait_for_change.remote(seen, timeout_s)
        view: ClusterView = _get(reference, timeout_s + STOP_TIMEOUT_S)
        return view

    def unreached_workers(self) -> tuple[str, ...]:
        """See `Supervisor.unreached_workers`."""
        reference = self._actor.unreached_workers.remote()
        unreached: tuple[str, ...] = _get(reference, STOP_TIMEOUT_S)
        return unreached

    def stop(self) -> None:
        """End every member, then the supervisor."""
        try:
            _get(self._actor.stop.remote(), self._stop_timeout_s)
        finally:
            ray.kill(self._actor)


def start_supervisor(config: ClusterConfig) -> SupervisorHandle:
    """Start the one supervisor of the running cluster; it begins to start the members."""
    actor_class: Any = ray.remote(SupervisorActor)  # Ray's own types do not carry `remote`.
    actor = actor_class.options(
        name=_SUPERVISOR_NAME, lifetime="detached", num_cpus=0, max_concurrency=_CALLS_AT_ONCE
    ).remote(to_mapping(config), RayLauncher)
    _get(actor.start.remote(), WORKER_START_TIMEOUT_S)
    return SupervisorHandle(actor, config.router.stop_grace_s)


def _get(reference: Any, timeout_s: float) -> Any:
    """Wait for a call. Raises `WorkerUnavailable` when its actor is gone or silent."""
    try:
        return ray.get(reference, timeout=timeout_s)
    except RayTaskError:
        raise  # A bug of ours in the actor: its traceback is what we need.
    except RayError as error:
        raise WorkerUnavailable(f"the supervisor does not answer: {_short(error)}") from error


class RayLauncher(Launcher):
    """Starts members as detached actors, which outlive a supervisor that dies."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = dict(config)

    def launch(self, spec: MemberSpec, launch: int) -> MemberHandle:
        """Ask Ray for the actor; whether it comes to life is told by its `start`."""
        match spec:
            case WorkerSpec():
                return _RayMember(self._launch_worker(spec, launch))
            case RouterSpec():
                return _RayMember(self._launch_router(spec, launch))

    def _launch_worker(self, spec: WorkerSpec, launch: int) -> Any:
        threads = str(spec.threads)
        options = {
            "num_cpus": spec.cpus,
            "num_gpus": spec.gpus,
            "max_concurrency": _WORKER_THREADS,
            # Read by OpenMP and MKL when torch is loaded; later it is too late.
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}},
        }
        return _actor(WorkerActor, spec.name, launch, options).remote(
            self._config, spec.worker_id, spec.role.value
        )

    def _launch_router(self, spec: RouterSpec, launch: int) -> Any:
        options = {"num_cpus": 0, "max_concurrency": _CALLS_AT_ONCE}
        control = _RayControl(ray.get_runtime_context().current_actor)
        return _actor(RouterActor, spec.name, launch, options).remote(self._config, spec, control)


class _RayControl(ClusterControl):
    """The supervisor, seen from a router."""

    def __init__(self, supervisor: Any) -> None:
        self._supervisor = supervisor

    async def add_worker(self, role: Role) -> str:
        return await _order(self._supervisor.add_worker.remote, role)

    async def set_role(self, worker_id: str, role: Role) -> None:
        await _order(self._supervisor.set_role.remote, worker_id, role)

    async def remove_worker(self, worker_id: str, drain_s: float) -> bool:
        return await _order(self._supervisor.remove_worker.remote, worker_id, drain_s)


async def _order(method: Callable[..., Awaitable[_T | KvferryError]], *arguments: object) -> _T:
    try:
        outcome = await method(*arguments)
    except RayTaskError:
        raise  # A bug of ours in the actor.
    except RayError as error:
        raise WorkerUnavailable(f"the supervisor does not answer: {_short(error)}") from error
    if isinstance(outcome, KvferryError):
        raise outcome
    return outcome


def _actor(kind: type, name: str, launch: int, options: dict[str, Any]) -> Any:
    """An actor class that Ray never restarts by itself: a restart is a new incarnation."""
    return ray.remote(kind).options(
        name=f"{name}/{launch}", lifetime="detached", max_restarts=0, **options
    )


class _RayMember(MemberHandle):
    """A member that is a Ray actor."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def start(self) -> StartOutcome:
        return await _ask(self._actor.start.remote)

    async def wait_until_ended(self) -> None:
        await _ask(self._actor.wait_until_ended.remote)

    async def is_alive(self) -> bool:
        return await _ask(self._actor.is_alive.remote)

    async def set_membership(self, membership: Membership) -> None:
        await _ask(self._actor.set_membership.remote, membership)

    async def reached_workers(self) -> tuple[str, ...]:
        return await _ask(self._actor.reached_workers.remote)

    async def has_work_at(self, worker_id: str) -> bool:
        return await _ask(self._actor.has_work_at.remote, worker_id)

    async def stop(self) -> None:
        await _ask(self._actor.stop.remote)

    def kill(self) -> None:
        ray.kill(self._actor)


async def _ask(method: Callable[..., Awaitable[_T]], *arguments: object) -> _T:
    try:
        return await method(*arguments)
    except RayTaskError as error:
        if isinstance(error, asyncio.CancelledError):
            raise MemberEnded("its call was cancelled") from error
        raise MemberEnded(f"failed: {error.cause!r}") from error
    except RayActorError as error:
        raise MemberEnded(_short(error)) from error
    except RayError as error:
        raise MemberEnded(f"Ray gave up on it: {_short(error)}") from error


def _short(error: Exception) -> str:
    """Ray's messages run over a dozen lines; the one that says how an actor died is enough."""
    text = str(error)
    for line in text.splitlines():
        if line.startswith("The actor is dead because"):
            return line.partition("Some common causes")[0].strip()
    return text.splitlines()[0] if text else type(error).__name__
