"""A cluster on a Ray cluster that runs already: brought up, found again, and taken down.

Unlike a cluster of `local_cluster` it belongs to no process: whoever is on a node of the Ray
cluster may bring it up, and somebody else take it down. Ray itself is left as it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from cluster import ray_runtime
from cluster.ray_launcher import RayLauncher
from cluster.ray_placement import release_all
from cluster.shutdown import run_every_step
from cluster.startup import wait_until_serving
from cluster.stay import stay
from kvferry.config import BUNDLED_MODEL
from kvferry.errors import ErrorKind, KvferryError, WorkerUnavailable
from kvferry.limits import STOP_TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cluster.ray_runtime import SupervisorHandle
    from cluster.supervisor import ClusterView
    from kvferry.clock import Clock
    from kvferry.config import ClusterConfig
    from kvferry.ray_config import RayConfig

_log = logging.getLogger(__name__)
_POLL_S = 0.1


class ClusterExists(KvferryError):
    """A kvferry cluster of that namespace runs on the Ray cluster, or is left of one."""

    kind = ErrorKind.ALREADY_EXISTS

    def __init__(self, namespace: str) -> None:
        super().__init__(
            f"ray.namespace: a kvferry cluster {namespace!r} runs already; "
            "`kvferry down` ends it, another namespace is another cluster"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class DownReport:
    """What taking a cluster down found."""

    was_up: bool
    killed: tuple[str, ...]
    """Names of members that did not end when they were asked to, or whom nobody could ask."""


def bring_up(config: ClusterConfig, clock: Clock) -> ClusterView:
    """Start a cluster and wait until all of it serves.

    Raises `NoRayCluster`, `ClusterExists`, and what `wait_until_serving` raises; of what was
    started nothing is left then.
    """
    with _connected(config.ray):
        if ray_runtime.find_supervisor() is not None or _members():
            raise ClusterExists(config.ray.namespace)
        launcher = functools.partial(RayLauncher, on_many_nodes=True)
        try:
            supervisor = ray_runtime.start_supervisor(for_any_node(config), launcher)
            return wait_until_serving(supervisor, clock)
        except BaseException:
            _take_down(config.ray.namespace, clock)
            raise


@contextlib.contextmanager
def running_supervisor(config: RayConfig) -> Iterator[SupervisorHandle | None]:
    """That of the cluster that runs; None: there is none. Raises `NoRayCluster`."""
    with _connected(config):
        yield ray_runtime.find_supervisor()


def stay_with(config: RayConfig, clock: Clock, tell: Callable[[str], None]) -> None:
    """Tell of the members of a running cluster until it is gone, see `cluster.stay`."""
    with _connected(config):
        stay(ray_runtime.find_supervisor, clock, time.sleep, tell)


def take_down(config: RayConfig, clock: Clock) -> DownReport:
    """End every process of a cluster. Raises `NoRayCluster`."""
    with _connected(config):
        return _take_down(config.namespace, clock)


def for_any_node(config: ClusterConfig) -> ClusterConfig:
    """With names of files that mean the same wherever they are read.

    Each node reads its own files: what the bundled model is converted into, too.
    """
    model = config.model
    path = model.path if model.path == BUNDLED_MODEL else _absolute(model.path)
    adapters = {name: _absolute(folder) for name, folder in model.adapters.items()}
    security = dataclasses.asdict(config.router.security)
    security = {name: _absolute(file) if file else "" for name, file in security.items()}
    return dataclasses.replace(
        config,
        model=dataclasses.replace(model, path=path, adapters=adapters),
        router=dataclasses.replace(
            config.router, security=dataclasses.replace(config.router.security, **security)
        ),
    )


def _absolute(file: str) -> str:
    return str(Path(file).expanduser().absolute())


@contextlib.contextmanager
def _connected(config: RayConfig) -> Iterator[None]:
    ray_runtime.connect_ray(config.address, config.namespace)
    try:
        yield
    finally:
        ray_runtime.stop_ray()


def _take_down(namespace: str, clock: Clock) -> DownReport:
    supervisor = ray_runtime.find_supervisor()
    was_up = supervisor is not None or bool(_members())
    killed: list[str] = []
    run_every_step(
        lambda: _stop(supervisor),
        lambda: killed.extend(_kill_members(clock)),
        lambda: release_all(namespace),
    )
    return DownReport(was_up, tuple(killed))


def _stop(supervisor: SupervisorHandle | None) -> None:
    if supervisor is None:
        return
    try:
        supervisor.stop()
    except WorkerUnavailable as error:
        _log.warning("no clean stop", extra={"reason": str(error)})


def _members() -> list[str]:
    """Names of the actors of this namespace."""
    names: list[str] = ray.util.list_named_actors()
    return names


def _kill_members(clock: Clock) -> list[str]:
    """Those that are there still. Waits until Ray knows of none."""
    killed = _members()
    give_up = clock.now() + STOP_TIMEOUT_S
    while left := _members():
        for name in left:
            # It may end meanwhile.
            with contextlib.suppress(ValueError):
                ray.kill(ray.get_actor(name))
        if clock.now() > give_up:
            raise WorkerUnavailable(f"Ray does not end {', '.join(left)}")
        time.sleep(_POLL_S)
    return killed
