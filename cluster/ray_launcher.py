"""What the supervisor asks of Ray: members as actors, whose errors become `MemberEnded`."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util import get_node_ip_address

from cluster.launcher import Launcher, MemberEnded, MemberHandle, StartOutcome
from cluster.members import MemberSpec, RouterSpec, WorkerSpec
from cluster.ray_autoscaler import ask_for_workers
from cluster.ray_errors import short_text
from cluster.ray_placement import RayPlaces
from cluster.router_actor import RouterActor
from cluster.worker_actor import WorkerActor
from kvferry.config import config_from_mapping
from kvferry.errors import KvferryError, WorkerUnavailable
from kvferry.limits import CALLS_AT_ONCE_MAX
from router.cluster_control import ClusterControl

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from cluster.ray_placement import Place
    from kvferry.membership import Membership, Role

_WORKER_THREADS = 4
"""Of a worker's actor: one each for a pending watcher, a health call and `stop`, and a spare."""

_PLACE_CHECK_INTERVAL_S = 1.0
"""While a member starts, between two questions whether its node is there."""

_T = TypeVar("_T")


class RayLauncher(Launcher):
    """Starts members as detached actors, which outlive a supervisor that dies."""

    def __init__(self, config: Mapping[str, Any], *, on_many_nodes: bool = False) -> None:
        """`on_many_nodes`: each member has a place of its own; else Ray, which is private, has all
        of them on its one node."""
        self._config = dict(config)
        tree = config_from_mapping(config)
        self._places = RayPlaces(tree.placement.strategy) if on_many_nodes else None
        self._ask_resources = functools.partial(ask_for_workers, groups=tree.workers)

    def launch(self, spec: MemberSpec, launch: int) -> MemberHandle:
        """Ask Ray for the actor; whether it comes to life is told by its `start`."""
        place = None if self._places is None else self._places.reserve(spec, launch)
        options = {} if place is None else place.options
        match spec:
            case WorkerSpec():
                return _RayMember(self._launch_worker(spec, launch, options), place)
            case RouterSpec():
                return _RayMember(self._launch_router(spec, launch, options), place)

    def _launch_worker(self, spec: WorkerSpec, launch: int, options: dict[str, Any]) -> Any:
        threads = str(spec.threads)
        options = options | {
            "num_cpus": spec.cpus,
            "num_gpus": spec.gpus,
            "max_concurrency": _WORKER_THREADS,
            # Read by OpenMP and MKL when torch is loaded; later it is too late.
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}},
        }
        if self._places is not None:
            options["resources"] = dict(spec.resources)
        return _actor(WorkerActor, spec.name, launch, options).remote(
            self._config, spec.worker_id, spec.role.value, get_node_ip_address
        )

    def _launch_router(self, spec: RouterSpec, launch: int, options: dict[str, Any]) -> Any:
        options = options | {"num_cpus": 0, "max_concurrency": CALLS_AT_ONCE_MAX}
        control = _RayControl(ray.get_runtime_context().current_actor)
        return _actor(RouterActor, spec.name, launch, options).remote(
            self._config, spec, control, get_node_ip_address, self._ask_resources
        )


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
        raise WorkerUnavailable(f"the supervisor does not answer: {short_text(error)}") from error
    if isinstance(outcome, KvferryError):
        raise outcome
    return outcome


def _actor(kind: type, name: str, launch: int, options: dict[str, Any]) -> Any:
    """An actor class that Ray never restarts by itself: a restart is a new incarnation."""
    return ray.remote(kind).options(
        name=f"{name}/{launch}",
        lifetime="detached",
        max_restarts=0,
        enable_task_events=False,  # Ray's server keeps 100,000 calls: health checks of hours.
        **options,
    )


class _RayMember(MemberHandle):
    """A member that is a Ray actor."""

    def __init__(self, actor: Any, place: Place | None) -> None:
        self._actor = actor
        self._place = place

    async def start(self) -> StartOutcome:
        asked: Awaitable[StartOutcome] = _ask(self._actor.start.remote)
        starting = asyncio.ensure_future(asked)
        try:
            while not starting.done():
                await asyncio.wait({starting}, timeout=_PLACE_CHECK_INTERVAL_S)
                # Ray would wait for another node with room, for as long as it takes.
                if self._place is not None and not starting.done() and self._place.is_lost():
                    raise MemberEnded("its node is gone")
            return await starting
        finally:
            starting.cancel()

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
        if self._place is not None:
            self._place.release()


async def _ask(method: Callable[..., Awaitable[_T]], *arguments: object) -> _T:
    try:
        return await method(*arguments)
    except RayTaskError as error:
        if isinstance(error, asyncio.CancelledError):
            raise MemberEnded("its call was cancelled") from error
        raise MemberEnded(f"failed: {error.cause!r}") from error
    except RayActorError as error:
        raise MemberEnded(short_text(error)) from error
    except RayError as error:
        raise MemberEnded(f"Ray gave up on it: {short_text(error)}") from error
