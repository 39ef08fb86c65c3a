"""A whole cluster on this machine: started, waited for, and stopped without a trace.

The calling process owns the cluster. Ray is a private instance with its own directory, so several
clusters of several processes live side by side; one process owns at most one at a time.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cluster import ray_runtime
from cluster.members import ROUTER_PORTS, cpus_wanted, http_port_of, members_of
from cluster.process_census import kill_all, processes_of
from cluster.shutdown import run_every_step
from cluster.startup import wait_until_serving
from engine.lora_config import read_lora_config
from kvferry.adapter_files import adapter_directory, read_adapter
from kvferry.addresses import LOOPBACK, host_to_bind
from kvferry.errors import ConfigError, KvferryError, WorkerUnavailable
from kvferry.limits import STOP_TIMEOUT_S
from router.api.security import Security

if TYPE_CHECKING:
    from types import TracebackType

    from cluster.ray_runtime import SupervisorHandle
    from cluster.supervisor import ClusterView
    from kvferry.clock import Clock
    from kvferry.config import ClusterConfig
    from kvferry.router_config import RouterConfig

_log = logging.getLogger(__name__)

_POLL_S = 0.1
_SOCKET_DIRECTORY_CHARACTERS_MAX = 40
"""Ray's socket paths add about 65 characters to it, and the system allows 107."""


@dataclass(frozen=True, slots=True)
class StopReport:
    """What stopping a cluster left to do by force."""

    killed: tuple[str, ...]
    """Names of processes that did not end by themselves."""
    left: tuple[str, ...]
    """Names of processes that could not be ended. Empty unless the system is in trouble."""


class LocalCluster:
    """A running cluster. Use as a context manager, or call `stop`."""

    def __init__(self, config: ClusterConfig, clock: Clock) -> None:
        """`config.model.path` must be a local directory (see `engine.model_directory`)."""
        self.config = _on_loopback(config)
        self._clock = clock
        self.directory = _make_directory()
        self._reaper = _start_reaper(self.directory)
        self._supervisor: SupervisorHandle | None = None

    def start(self) -> ClusterView:
        """Start everything and wait until all members serve.

        Raises `ClusterStartFailed` when a member cannot start, `DeadlineExceeded` when it takes
        too long. The caller stops the cluster in either case.
        """
        specs = members_of(self.config)
        cpus = max(cpus_wanted(specs), float(os.cpu_count() or 1))
        ray_runtime.start_ray(self.directory, self.config.worker_host, cpus)
        self._supervisor = ray_runtime.start_supervisor(self.config)
        return wait_until_serving(self._supervisor, self._clock)

    @property
    def address(self) -> str:
        """host:port of the router. Raises `WorkerUnavailable` while there is none."""
        routers = self.view().routers
        if not routers:
            raise WorkerUnavailable("no router is running")
        return routers[0].address

    @property
    def http_address(self) -> str:
        """host:port of the OpenAI API. Raises `WorkerUnavailable` while there is no router."""
        routers = self.view().routers
        if not routers:
            raise WorkerUnavailable("no router is running")
        return routers[0].http_address

    def view(self) -> ClusterView:
        """The members as the supervisor sees them."""
        return self._running().view()

    def wait_for_change(self, seen: int, timeout_s: float) -> ClusterView:
        """The view as soon as its `changes` is beyond `seen`, or after `timeout_s`."""
        return self._running().wait_for_change(seen, timeout_s)

    def stop(self) -> StopReport:
        """End every process of the cluster and remove its directory. May be called again."""
        reports: list[StopReport] = []
        run_every_step(
            self._stop_supervisor,
            ray_runtime.stop_ray,
            lambda: reports.append(self._end_processes()),
            lambda: shutil.rmtree(self.directory, ignore_errors=True),
            self._dismiss_reaper,
        )
        return reports[0]

    def _stop_supervisor(self) -> None:
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None:
            return
        try:
            supervisor.stop()
        except KvferryError as error:
            _log.warning("no clean stop", extra={"reason": str(error)})

    def _dismiss_reaper(self) -> None:
        assert self._reaper.stdin is not None
        self._reaper.stdin.close()
        self._reaper.wait(STOP_TIMEOUT_S)

    def __enter__(self) -> LocalCluster:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _running(self) -> SupervisorHandle:
        if self._supervisor is None:
            raise WorkerUnavailable("the cluster is not running")
        return self._supervisor

    def _end_processes(self) -> StopReport:
        """Wait for what is ending, then use force. Zombies count as ended."""
        killed: dict[int, str] = {}
        grace_over = self._clock.now() + 0.5 * STOP_TIMEOUT_S
        give_up = grace_over + STOP_TIMEOUT_S
        left = processes_of(self.directory)
        while left and self._clock.now() < give_up:
            if self._clock.now() > grace_over:
                killed |= {process.pid: process.name for process in left}
                kill_all(left)
            time.sleep(_POLL_S)
            left = processes_of(self.directory)
        return StopReport(tuple(killed.values()), tuple(process.name for process in left))


def _on_loopback(config: ClusterConfig) -> ClusterConfig:
    """With the hosts that are left to the node. Ray is not asked: it takes loopback for a mistake,
    and names an address at which others reach the machine."""
    router = dataclasses.replace(config.router, host=host_to_bind(config.router.host, LOOPBACK))
    worker_host = host_to_bind(config.worker_host, LOOPBACK)
    return dataclasses.replace(config, router=router, worker_host=worker_host)


def check_port_free(router: RouterConfig) -> None:
    """Raise `ConfigError` if a port of a router is taken, before half a cluster has started."""
    host = host_to_bind(router.host, LOOPBACK)
    addresses = {
        "router.port": (host, router.port),
        "router.http.port": (host, http_port_of(router)),
        "router.smg.port": (router.smg.host, router.smg.port),
    }
    for name, address in addresses.items():
        for number in range(router.replicas):
            _probe(name, address, ROUTER_PORTS * number)


def _probe(name: str, address: tuple[str, int], shift: int) -> None:
    host, port = address[0], address[1] and address[1] + shift
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            problem = f"{host}:{port} is in use ({error.strerror})"
            hint = "0 takes a free one" if name == "router.port" else "set another one"
            raise ConfigError(name, f"{problem}; {hint}") from error


def check_security(config: ClusterConfig) -> ClusterConfig:
    """Raise `ConfigError` if a file of `router.security` cannot be used, before half a cluster has
    been started. Returns the configuration with absolute names, for processes elsewhere."""
    Security(config.router.security)
    files = dataclasses.asdict(config.router.security)
    absolute = {name: str(Path(file).absolute()) if file else "" for name, file in files.items()}
    security = dataclasses.replace(config.router.security, **absolute)
    return dataclasses.replace(config, router=dataclasses.replace(config.router, security=security))


def with_model_directory(config: ClusterConfig, directory: Path) -> ClusterConfig:
    """The configuration with its model and adapters resolved, as actors expect it.

    Raises `ConfigError` for an adapter that no worker could use, before half a cluster is there.
    """
    adapters = {
        name: str(adapter_directory(name, folder)) for name, folder in config.model.adapters.items()
    }
    for name, folder in adapters.items():
        read_lora_config(read_adapter(name, folder))
    model = dataclasses.replace(config.model, path=str(directory.resolve()), adapters=adapters)
    return dataclasses.replace(config, model=model)


def _make_directory() -> Path:
    parent = tempfile.gettempdir()
    if len(parent) > _SOCKET_DIRECTORY_CHARACTERS_MAX - len("/kvferry-12345678"):
        parent = "/tmp"
    return Path(tempfile.mkdtemp(prefix="kvferry-", dir=parent))


def _start_reaper(directory: Path) -> subprocess.Popen[bytes]:
    # A session of its own: Ctrl-C in the terminal must not reach it.
    return subprocess.Popen(
        [sys.executable, "-m", "cluster.reaper", str(directory)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
