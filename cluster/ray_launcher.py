"""What the supervisor asks of Ray: members as actors, whose errors become `NoAnswer`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.experimental import internal_kv
from ray.util import get_node_ip_address, list_named_actors

from cluster.cluster_record import RecordStore
from cluster.launcher import (
    FoundProcess,
    Launcher,
    MemberEnded,
    MemberHandle,
    MemberUnreached,
    StartOutcome,
)
from cluster.members import MemberSpec, RouterSpec, WorkerSpec
from cluster.ray_autoscaler import ask_for_workers
from cluster.ray_errors import short_text
from cluster.ray_placement import RayPlaces
from cluster.router_actor import RouterActor
from cluster.worker_actor import WorkerActor
from kvferry.config import config_from_mapping, to_mapping
from kvferry.errors import KvferryError, WorkerUnavailable
from kvferry.limits import CALLS_AT_ONCE_MAX, SUPERVISOR_FIND_S
from router.cluster_control import ClusterControl

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from cluster.members import MemberInfo
    from cluster.ray_placement import Place
    from kvferry.config import ClusterConfig
    from kvferry.membership import Membership, Role
    from router.cluster_control import RolloutReport, ScaleOutcome

SUPERVISOR_NAME = "supervisor"

_WORKER_THREADS = 8
"""Of a worker's actor: one each for a pending watcher, a health call and `stop`; the others for
those of supervisors that are gone, whose calls end a little later."""

_WATCH_S = 10.0
"""Of one call that waits for the end of a process; the next one follows at once."""

_RECORDS = "kvferry"
"""Ray's store has the record of each cluster here, under the namespace of its actors."""

_PLACE_CHECK_INTERVAL_S = 1.0
"""While a member starts, between two questions whether its node is there."""

_T = TypeVar("_T")


class RayLauncher(Launcher):
    """Starts members as detached actors, which outlive a supervisor that dies.

    What asks Ray's head is done in threads: while the head restarts, such calls hang, and whoever
    watches the members must not.
    """

    def __init__(self, config: Mapping[str, Any], *, on_many_nodes: bool = False) -> None:
        """`on_many_nodes`: each member has a place of its own; else Ray, which is private, has all
        of them on its one node."""
        tree = config_from_mapping(config)
        self._places = RayPlaces(tree.placement.strategy) if on_many_nodes else None
        self._placing = threading.Lock()
        """One member at a time: where the next one goes depends on where this one went."""
        self._ask_resources = functools.partial(ask_for_workers, groups=tree.workers)

    async def launch(self, spec: MemberSpec, launch: int, config: ClusterConfig) -> MemberHandle:
        """Ask Ray for the actor; whether it comes to life is told by its `start`."""
        return await asyncio.to_thread(self._launch, spec, launch, to_mapping(config))

    def _launch(self, spec: MemberSpec, launch: int, config: Mapping[str, Any]) -> MemberHandle:
        with self._placing:
            place = None if self._places is None else self._places.reserve(spec, launch)
        options = {} if place is None else place.options
        match spec:
            case WorkerSpec():
                if self._places is not None:
                    options["resources"] = dict(spec.resources)
                return _RayMember(_launch_worker(spec, launch, config, options), place)
            case RouterSpec():
                asks = self._ask_resources
                return _RayMember(_launch_router(spec, launch, config, options, asks), place)

    async def living(self) -> list[FoundProcess]:
        """Our actors in Ray's list that are members."""
        return await asyncio.to_thread(_living, self._places)

    async def has_room(self, spec: MemberSpec) -> bool:
        """Whether Ray has that much unreserved, over all nodes."""
        if isinstance(spec, RouterSpec):
            return self._places is None  # Its successor has to be on its node.
        free: dict[str, float] = await asyncio.to_thread(ray.available_resources)
        return free.get("CPU", 0.0) >= spec.cpus and free.get("GPU", 0.0) >= spec.gpus


class RayRecordStore(RecordStore):
    """The record in the store of Ray's head: it lives exactly as long as the actors it tells of.

    That is in the head's memory, or in Redis where the head keeps its state there.
    """

    async def load(self) -> str | None:
        """See `RecordStore`."""
        return await asyncio.to_thread(_load_record)

    async def save(self, text: str) -> None:
        """See `RecordStore`."""
        await asyncio.to_thread(_save_record, text)


def forget_record() -> None:
    """For a cluster that begins anew, in the namespace of the caller."""
    internal_kv._internal_kv_del(_namespace(), namespace=_RECORDS)


def _namespace() -> str:
    name: str = ray.get_runtime_context().namespace
    return name


def _load_record() -> str | None:
    try:
        found: Any = internal_kv._internal_kv_get(_namespace(), namespace=_RECORDS)
    except RayError as error:
        raise WorkerUnavailable(f"Ray's head does not answer: {short_text(error)}") from error
    return None if found is None else found.decode()


def _save_record(text: str) -> None:
    try:
        internal_kv._internal_kv_put(_namespace(), text.encode(), namespace=_RECORDS)
    except RayError as error:
        raise WorkerUnavailable(f"Ray's head does not answer: {short_text(error)}") from error


def _living(places: RayPlaces | None) -> list[FoundProcess]:
    found = []
    try:
        for full_name in list_named_actors():
            name, _, launch = full_name.rpartition("/")
            if name:
                with contextlib.suppress(ValueError):  # It has ended meanwhile.
                    actor = ray.get_actor(full_name)
                    place = None if places is None else places.find(name, int(launch))
                    found.append(FoundProcess(name, int(launch), _RayMember(actor, place)))
        if places is not None:
            places.release_dead({(each.name, each.launch) for each in found})
    except RayError as error:
        raise WorkerUnavailable(f"Ray's head does not answer: {short_text(error)}") from error
    return found


def _launch_worker(
    spec: WorkerSpec, launch: int, config: Mapping[str, Any], options: dict[str, Any]
) -> Any:
    threads = str(spec.threads)
    options = options | {
        "num_cpus": spec.cpus,
        "num_gpus": spec.gpus,
        "max_concurrency": _WORKER_THREADS,
        # Read by OpenMP and MKL when torch is loaded; later it is too late.
        "runtime_env": {"env_vars": {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}},
    }
    return _actor(WorkerActor, spec.name, launch, options).remote(
        config, spec.worker_id, spec.role.value, get_node_ip_address
    )


def _launch_router(
    spec: RouterSpec,
    launch: int,
    config: Mapping[str, Any],
    options: dict[str, Any],
    ask_resources: Callable[[int], None],
) -> Any:
    options = options | {"num_cpus": 0, "max_concurrency": CALLS_AT_ONCE_MAX}
    return _actor(RouterActor, spec.name, launch, options).remote(
        config, spec, _RayControl(), get_node_ip_address, ask_resources
    )


class _RayControl(ClusterControl):
    """The supervisor, seen from a router: found by its name whenever there is an order."""

    async def add_worker(self, role: Role) -> str:
        answer: str = await _order("add_worker", role)
        return answer

    async def set_role(self, worker_id: str, role: Role) -> None:
        await _order("set_role", worker_id, role)

    async def remove_worker(self, worker_id: str, drain_s: float) -> bool:
        answer: bool = await _order("remove_worker", worker_id, drain_s)
        return answer

    async def scale(self, role: Role, count: int, drain_s: float) -> ScaleOutcome:
        answer: ScaleOutcome = await _order("scale", role, count, drain_s)
        return answer

    async def apply(self, config: ClusterConfig, drain_s: float) -> RolloutReport:
        answer: RolloutReport = await _order("apply", to_mapping(config), drain_s)
        return answer

    async def restart(self, worker_ids: Sequence[str], drain_s: float) -> RolloutReport:
        answer: RolloutReport = await _order("restart", worker_ids, drain_s)
        return answer

    async def rollout(self) -> RolloutReport:
        answer: RolloutReport = await _order("rollout")
        return answer


async def _order(name: str, *arguments: object) -> Any:
    try:
        async with asyncio.timeout(SUPERVISOR_FIND_S):
            supervisor = await asyncio.to_thread(ray.get_actor, SUPERVISOR_NAME)
        outcome = await getattr(supervisor, name).remote(*arguments)
    except RayTaskError:
        raise  # A bug of ours in the actor.
    except (RayError, ValueError, TimeoutError) as error:
        problem = f"the supervisor does not answer, try again: {short_text(error)}"
        raise WorkerUnavailable(problem) from error
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
                if not starting.done() and await self._has_lost_its_place():
                    raise MemberEnded("its node is gone")
            return await starting
        finally:
            starting.cancel()

    async def _has_lost_its_place(self) -> bool:
        if self._place is None:
            return False
        try:
            return await asyncio.to_thread(self._place.is_lost)
        except RayError:
            return False  # The head is away, and with it whoever could tell.

    async def describe(self) -> MemberInfo | None:
        return await _ask(self._actor.describe.remote)

    async def wait_until_ended(self) -> None:
        while not await _ask(self._actor.wait_until_ended.remote, _WATCH_S):
            pass

    async def is_alive(self) -> bool:
        return await _ask(self._actor.is_alive.remote)

    async def set_membership(self, membership: Membership) -> None:
        await _ask(self._actor.set_membership.remote, membership)

    async def reached_workers(self) -> tuple[str, ...]:
        return await _ask(self._actor.reached_workers.remote)

    async def has_work_at(self, worker_id: str) -> bool:
        return await _ask(self._actor.has_work_at.remote, worker_id)

    async def retire(self, grace_s: float) -> None:
        await _ask(self._actor.retire.remote, grace_s)

    async def stop(self) -> None:
        await _ask(self._actor.stop.remote)

    async def kill(self) -> None:
        await asyncio.to_thread(self._kill)

    def _kill(self) -> None:
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
    except ActorUnavailableError as error:
        raise MemberUnreached(short_text(error)) from error
    except RayActorError as error:
        raise MemberEnded(short_text(error)) from error
    except RayError as error:
        raise MemberEnded(f"Ray gave up on it: {short_text(error)}") from error
