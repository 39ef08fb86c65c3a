"""What shall run: one specification per process of a cluster, derived from its configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from kvferry.ids import WorkerId
from kvferry.membership import Role, WorkerInfo

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvferry.config import ClusterConfig, WorkerGroupConfig, WorkersConfig
    from kvferry.router_config import RouterConfig

ROUTER_PORTS = 2
"""Of each router: gRPC and HTTP."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker that shall run."""

    worker_id: WorkerId
    role: Role
    cpus: float
    gpus: float
    threads: int
    resources: Mapping[str, float] = field(default_factory=dict)
    """Further resources of Ray that it reserves."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """What its node must be labelled with."""
    revision: int = 0
    """The configuration that it runs under, see `cluster.cluster_record`."""
    lineage: int = 0
    """The revision since which workers exchange KV and routers know their model: those of another
    lineage are strangers to it."""

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
    port_tries: int = 1
    """Pairs of ports to look at: another router of the same node may have the first ones."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Resources of Ray that it reserves."""
    revision: int = 0
    """As of a worker."""
    lineage: int = 0
    """It is told of workers of this lineage alone."""
    is_successor: bool = False
    """It takes over the ports of another one, which serves until this one is able to."""

    def ports_of(self, attempt: int) -> tuple[int, int]:
        """What to bind for gRPC and for HTTP in an attempt, from 0."""
        shift = ROUTER_PORTS * attempt
        return self.port and self.port + shift, self.http_port and self.http_port + shift


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
    routers = tuple(router_spec(config.router, number) for number in range(config.router.replicas))
    workers = tuple(
        worker_spec(role, number, group_of(config.workers, role))
        for role in Role
        for number in range(group_of(config.workers, role).count)
    )
    return (*routers, *workers)


def router_spec(router: RouterConfig, number: int) -> RouterSpec:
    """The router of this number."""
    ports = router.port, http_port_of(router)
    return RouterSpec(
        f"router-{number}",
        router.host,
        *ports,
        port_tries=router.replicas,
        resources=router.resources,
    )


def worker_spec(role: Role, number: int, group: WorkerGroupConfig) -> WorkerSpec:
    """The worker of this number of a group."""
    name = WorkerId(f"{role.value}-{number}")
    return WorkerSpec(
        name, role, group.cpus, group.gpus, group.threads, group.resources, group.labels
    )


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
