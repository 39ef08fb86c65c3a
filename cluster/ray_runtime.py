"""Ray for the process that owns a cluster: started, stopped, and the supervisor in it."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from cluster.process_census import MARK
from cluster.ray_errors import short_text
from cluster.ray_launcher import (
    SUPERVISOR_NAME,
    RayLauncher,
    RayRecordStore,
    forget_record,
)
from cluster.supervisor_actor import SupervisorActor
from kvferry.addresses import AUTO
from kvferry.clock import MonotonicClock
from kvferry.config import to_mapping
from kvferry.errors import ErrorKind, KvferryError, WorkerUnavailable
from kvferry.limits import (
    CALLS_AT_ONCE_MAX,
    OBJECT_STORE_BYTES,
    RECORD_SAVE_TIMEOUT_S,
    SESSION_CONNECT_TIMEOUT_S,
    STOP_TIMEOUT_S,
    SUPERVISOR_AWAY_MAX_S,
    WORKER_START_TIMEOUT_S,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from cluster.launcher import Launcher
    from cluster.supervisor import ClusterView
    from kvferry.config import ClusterConfig
    from router.cluster_control import RolloutReport

_NAMESPACE = "kvferry"
_STOP_ALL_TIMEOUT_S = 3 * STOP_TIMEOUT_S
"""Of a supervisor, after the routers' grace: one each for the routers and the workers, and one for
the calls themselves."""

_AWAY_POLL_S = 0.2
"""Between two calls of a supervisor that is being started again."""

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


class NoRayCluster(KvferryError):
    """There is no Ray cluster at that address, or this machine is no node of it."""

    kind = ErrorKind.UNAVAILABLE


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


def connect_ray(address: str, namespace: str) -> None:
    """Connect to a Ray cluster of which this machine is a node; `stop_ray` leaves it as it is.

    Raises `NoRayCluster`.
    """
    handler = signal.getsignal(signal.SIGTERM)
    try:
        if address != AUTO:
            # Ray itself tries for minutes.
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), SESSION_CONNECT_TIMEOUT_S).close()
        ray.init(
            address=address,
            namespace=namespace,
            configure_logging=True,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise NoRayCluster(f"ray.address: {address}: {short_text(error)}") from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


class SupervisorHandle:
    """The supervisor, seen from a process outside. Calls block, also while it is away: then the
    one that takes its place answers."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def view(self) -> ClusterView:
        """The cluster as it is now."""
        view: ClusterView = _call(self._actor.view.remote, STOP_TIMEOUT_S)
        return view

    def wait_for_change(self, seen: int, timeout_s: float) -> ClusterView:
        """See `Supervisor.wait_for_change`."""
        method = self._actor.wait_for_change.remote
        view: ClusterView = _call(method, timeout_s + STOP_TIMEOUT_S, seen, timeout_s)
        return view

    def unreached_workers(self) -> tuple[str, ...]:
        """See `Supervisor.unreached_workers`."""
        method = self._actor.unreached_workers.remote
        unreached: tuple[str, ...] = _call(method, STOP_TIMEOUT_S)
        return unreached

    def apply(self, config: ClusterConfig, drain_s: float) -> RolloutReport:
        """See `Operations.apply`."""
        method = self._actor.apply.remote
        timeout_s = STOP_TIMEOUT_S + RECORD_SAVE_TIMEOUT_S
        return _report_of(_call(method, timeout_s, to_mapping(config), drain_s))

    def rollout(self) -> RolloutReport:
        """See `Operations.rollout`."""
        return _report_of(_call(self._actor.rollout.remote, STOP_TIMEOUT_S))

    def stop(self) -> None:
        """End every member, then the supervisor."""
        try:
            grace_s = _call(self._actor.router_grace_s.remote, STOP_TIMEOUT_S)
            _call(self._actor.stop.remote, grace_s + _STOP_ALL_TIMEOUT_S)
        finally:
            ray.kill(self._actor)


def start_supervisor(
    config: ClusterConfig,
    make_launcher: Callable[[Mapping[str, Any]], Launcher] = RayLauncher,
) -> SupervisorHandle:
    """Start the one supervisor of the cluster; it begins to start the members."""
    forget_record()
    actor_class: Any = ray.remote(SupervisorActor)  # Ray's own types do not carry `remote`.
    actor = actor_class.options(
        name=SUPERVISOR_NAME,
        lifetime="detached",
        num_cpus=0,
        max_concurrency=CALLS_AT_ONCE_MAX,
        enable_task_events=False,
        max_restarts=-1,  # It finds its members again; see `cluster.takeover`.
    ).remote(to_mapping(config), make_launcher, RayRecordStore)
    _get(actor.start.remote(), WORKER_START_TIMEOUT_S)
    return SupervisorHandle(actor)


def find_supervisor() -> SupervisorHandle | None:
    """The supervisor of this namespace, if there is one."""
    try:
        return SupervisorHandle(ray.get_actor(SUPERVISOR_NAME))
    except ValueError:
        return None


def _report_of(outcome: RolloutReport | KvferryError) -> RolloutReport:
    """Raises what the supervisor has refused an order with."""
    if isinstance(outcome, KvferryError):
        raise outcome
    return outcome


def _call(method: Callable[..., Any], timeout_s: float, *arguments: object) -> Any:
    """As `_get`, but a supervisor that is being started again is waited for."""
    clock = MonotonicClock()
    give_up = clock.now() + SUPERVISOR_AWAY_MAX_S
    while True:
        try:
            return ray.get(method(*arguments), timeout=timeout_s)
        except ActorUnavailableError as error:
            if clock.now() > give_up:
                problem = f"the supervisor stays away: {short_text(error)}"
                raise WorkerUnavailable(problem) from error
            time.sleep(_AWAY_POLL_S)
        except RayTaskError:
            raise
        except RayError as error:
            problem = f"the supervisor does not answer: {short_text(error)}"
            raise WorkerUnavailable(problem) from error


def _get(reference: Any, timeout_s: float) -> Any:
    """Wait for a call. Raises `WorkerUnavailable` when its actor is gone or silent."""
    try:
        return ray.get(reference, timeout=timeout_s)
    except RayTaskError:
        raise  # A bug of ours in the actor: its traceback is what we need.
    except RayError as error:
        raise WorkerUnavailable(f"the supervisor does not answer: {short_text(error)}") from error
