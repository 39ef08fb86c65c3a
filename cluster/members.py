"""What shall run: one specification per process of a cluster, derived from its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from kvferry.ids import WorkerId
from kvferry.membership import Role, WorkerInfo

if TYPE_CHECKING:
    from kvferry.config import ClusterConfig, WorkerGroupConfig, WorkersConfig
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
    router = RouterSpec(
        ROUTER_NAME, config.router.host, config.router.port, http_port_of(config.router)
    )
    workers = tuple(
        worker_spec(role, number, group_of(config.workers, role))
        for role in Role
        for number in range(group_of(config.workers, role).count)
    )
    return (router, *workers)


def worker_spec(role: Role, number: int, group: WorkerGroupConfig) -> WorkerSpec:
    """The worker of this number of a group."""
    name = WorkerId(f"{role.value}-{number}")
    return WorkerSpec(name, role, group.cpus, group.gpus, group.threads)


def group_of(groups: WorkersConfig, role: Role) -> WorkerGroupConfig:
    """How workers that are made for this role are set up."""
    match role:
        case Role.PREFILL:
            return groups.prefill
        case Role.DECODE:
            return groups.decode
        case Role.BOTH:
            return groups.both


def http_port_of(router: RouterConfig) -> int:
    """The one that is set, or the one after that of gRPC; 0 takes a free one."""
    return router.http.port or (router.port + 1 if router.port else 0)


def cpus_wanted(specs: tuple[MemberSpec, ...]) -> float:
    """CPUs that the members reserve together. Routers reserve none."""
    return sum(spec.cpus for spec in specs if isinstance(spec, WorkerSpec))
