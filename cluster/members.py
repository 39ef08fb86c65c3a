"""What shall run: one specification per process of a cluster, derived from its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from kvferry.ids import WorkerId
from kvferry.membership import Role, WorkerInfo

if TYPE_CHECKING:
    from kvferry.config import ClusterConfig, WorkerGroupConfig
    from kvferry.router_config import RouterConfig

ROUTER_NAME = "router-0"


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker that shall run."""

    worker_id: WorkerId
    role: Role
    cpus: float
    gpus: float
    threads: int

    @property
    def name(self) -> str:
        """Unique among the members of the cluster."""
        return self.worker_id


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """One router that shall run."""

    name: str
    host: str
    port: int
    """0 takes a free port at the first start; a restart gets the same one again."""
    http_port: int
    """The same of HTTP."""


MemberSpec: TypeAlias = WorkerSpec | RouterSpec


@dataclass(frozen=True, slots=True)
class RouterInfo:
    """One running router."""

    name: str
    host: str
    port: int
    http_port: int
    pid: int

    @property
    def address(self) -> str:
        """host:port of its gRPC server."""
        return f"{self.host}:{self.port}"

    @property
    def http_address(self) -> str:
        """host:port of its HTTP server."""
        return f"{self.host}:{self.http_port}"


MemberInfo: TypeAlias = WorkerInfo | RouterInfo


def members_of(config: ClusterConfig) -> tuple[MemberSpec, ...]:
    """Routers first: a worker is of no use before a router knows it."""
    groups: tuple[tuple[Role, WorkerGroupConfig], ...] = (
        (Role.PREFILL, config.workers.prefill),
        (Role.DECODE, config.workers.decode),
        (Role.BOTH, config.workers.both),
    )
    router = RouterSpec(
        ROUTER_NAME, config.router.host, config.router.port, http_port_of(config.router)
    )
    workers = tuple(
        WorkerSpec(WorkerId(f"{role.value}-{number}"), role, group.cpus, group.gpus, group.threads)
        for role, group in groups
        for number in range(group.count)
    )
    return (router, *workers)


def http_port_of(router: RouterConfig) -> int:
    """The one that is set, or the one after that of gRPC; 0 takes a free one."""
    return router.http.port or (router.port + 1 if router.port else 0)


def cpus_wanted(specs: tuple[MemberSpec, ...]) -> float:
    """CPUs that the members reserve together. Routers reserve none."""
    return sum(spec.cpus for spec in specs if isinstance(spec, WorkerSpec))
