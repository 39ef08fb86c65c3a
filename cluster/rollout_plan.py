"""What a new configuration changes in a cluster that runs, and who has to be replaced for it.

Settings are told apart by whom they concern. What is not known to be harmless to mix is not mixed:
workers of the old and the new configuration then serve different routers (a new *lineage*).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from cluster.members import RouterSpec, WorkerSpec
from kvferry.addresses import AUTO
from kvferry.config import to_mapping
from kvferry.errors import ConfigError
from kvferry.membership import Role

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from cluster.members import MemberSpec
    from kvferry.config import ClusterConfig

_FIXED = (
    *(
        "ray.",
        "placement.",
        "router.host",
        "router.port",
        "router.http.port",
        "router.smg.port",
        "router.smg.host",
    ),
    *("worker_host", "router.replicas", "router.resources"),
)
"""Others know the cluster by these, or reach its processes there."""

_MIXED = (
    *("cache.memory_bytes", "cache.rows", "cache.radix", "cache.eviction", "cache.host."),
    *("cache.audit", "cache.audit_interval_steps"),
    *("scheduler.itl_limit_ms", "scheduler.queue_max", "scheduler.output_reserve"),
    "speculation.",
)
"""Each worker's own affair: workers that differ in these exchange KV, and no router asks."""

_OF_ROUTERS = ("router.", "tracing.", "planner.")

_LIVE = ("restart_backoff_s",)
"""The supervisor's own; with the counts, all that replaces nobody."""


class RolloutPhase(Enum):
    """How far it is."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """Who is replaced, and by what."""

    revision: int
    former_revision: int
    """What those that it fails to replace run under again."""
    former_lineage: int
    workers: tuple[str, ...]
    """To be replaced, in this order."""
    routers: tuple[str, ...]
    is_new_lineage: bool
    """Routers and workers of the old and the new configuration have nothing to do with another."""
    drain_s: float
    changes: tuple[str, ...] = ()
    """Names of the settings that differ."""


@dataclass(frozen=True, slots=True)
class RolloutState:
    """The last rollout, under way or over. On record, so that a new supervisor goes on with it."""

    plan: RolloutPlan
    phase: str = RolloutPhase.RUNNING.value
    reason: str = ""
    """Why it failed."""

    @property
    def is_running(self) -> bool:
        """Whether it is under way."""
        return self.phase == RolloutPhase.RUNNING.value


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """What differs between two configurations, by whom it concerns."""

    names: tuple[str, ...]
    """Every setting that differs."""
    counts: Mapping[Role, int]
    """Numbers of workers that are others than before."""
    groups: frozenset[Role]
    """Whose workers have to be replaced."""
    of_routers: tuple[str, ...]
    """Those of them for which routers have to be replaced."""
    is_new_lineage: bool

    @property
    def replaces_routers(self) -> bool:
        """Whether routers have to be replaced."""
        return bool(self.of_routers)


def with_hosts_of(old: ClusterConfig, new: ClusterConfig) -> ClusterConfig:
    """The new configuration with the hosts that it leaves to the nodes as they are: `serve` has put
    loopback there."""
    if new.worker_host == AUTO:
        new = replace(new, worker_host=old.worker_host)
    if new.router.host == AUTO:
        new = replace(new, router=replace(new.router, host=old.router.host))
    return new


def change_between(old: ClusterConfig, new: ClusterConfig) -> ConfigChange:
    """Raises `ConfigError` naming a setting that cannot be changed while the cluster runs."""
    before, after = flat_settings(old), flat_settings(new)
    names = tuple(sorted(name for name in before | after if before.get(name) != after.get(name)))
    for name in names:
        if name.startswith(_FIXED):
            problem = f"cannot be changed while the cluster runs, from {before[name]!r}"
            raise ConfigError(name, f"{problem} to {after[name]!r}; stop it and start it again")
    counts = {role: after[_count(role)] for role in Role if _count(role) in names}
    _check_kinds_of_roles(counts, old, new)
    others = [name for name in names if not name.endswith(".count") and name not in _LIVE]
    of_workers = [name for name in others if not name.startswith(_OF_ROUTERS)]
    of_all = [name for name in of_workers if not name.startswith(("workers.", *_MIXED))]
    is_new_lineage = bool(of_all)
    groups = {
        role
        for role in Role
        for name in of_workers
        if not name.startswith("workers.") or name.startswith(f"workers.{role.value}.")
    }
    return ConfigChange(
        names,
        counts,
        frozenset(Role) if is_new_lineage else frozenset(groups),
        of_routers=(*(name for name in others if name.startswith(_OF_ROUTERS)), *of_all),
        is_new_lineage=is_new_lineage,
    )


def concerned(
    specs: Iterable[MemberSpec], configs: Mapping[int, ClusterConfig], new: ClusterConfig
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Workers and routers, by name, that must be replaced to run as under `new`. `configs`: what
    each of them runs under, by its revision."""
    changes = {number: change_between(config, new) for number, config in configs.items()}
    known = tuple(specs)
    workers = [
        spec
        for spec in known
        if isinstance(spec, WorkerSpec) and spec.role in changes[spec.revision].groups
    ]
    routers = [
        spec.name
        for spec in known
        if isinstance(spec, RouterSpec) and changes[spec.revision].replaces_routers
    ]
    return decoding_first(workers), tuple(routers)


def decoding_first(workers: Iterable[WorkerSpec]) -> tuple[str, ...]:
    """In the order in which they are replaced: without one that decodes a router has no use."""
    return tuple(spec.name for spec in sorted(workers, key=lambda spec: spec.role is Role.PREFILL))


def flat_settings(config: ClusterConfig) -> dict[str, Any]:
    """Every setting by its dotted name."""
    out: dict[str, Any] = {}
    for name, value in to_mapping(config).items():
        _flatten(name, value, out)
    return out


def _flatten(name: str, value: Any, out: dict[str, Any]) -> None:
    # The adapters are one setting: they are a mapping by themselves.
    if isinstance(value, dict) and name != "model.adapters":
        for key, below in value.items():
            _flatten(f"{name}.{key}", below, out)
    else:
        out[name] = value


def _count(role: Role) -> str:
    return f"workers.{role.value}.count"


def _may_exchange(config: ClusterConfig) -> bool:
    """Whether there are handoffs, on which depends how much KV a worker keeps."""
    return config.workers.prefill.count + config.workers.decode.count > 0


def _check_kinds_of_roles(
    counts: Mapping[Role, int], old: ClusterConfig, new: ClusterConfig
) -> None:
    if counts and _may_exchange(old) != _may_exchange(new):
        name = _count(next(iter(counts)))
        problem = "cannot turn handoffs on or off while the cluster runs"
        raise ConfigError(name, f"{problem}; stop it and start it again")
