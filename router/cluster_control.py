"""What the operator of a cluster may order, as the router passes it on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvferry.config import ClusterConfig
    from kvferry.membership import Role


@dataclass(frozen=True, slots=True)
class ScaleOutcome:
    """Who comes and who goes for a number of workers."""

    added: tuple[str, ...]
    """Being started."""
    draining: tuple[str, ...]
    """They finish what they have, and leave."""


@dataclass(frozen=True, slots=True)
class RolloutReport:
    """How far the last rollout is."""

    phase: str
    """running, done or failed."""
    revision: int
    """Of the configuration, counted from 0 at the start of the cluster."""
    replaced: int
    """Workers and routers that are as they shall be."""
    to_replace: int
    """Of so many."""
    detail: str
    """What it waits for, or why it failed."""
    changes: tuple[str, ...]
    """Names of the settings that it changes."""


class ClusterControl(Protocol):
    """Who keeps the members of the cluster running. Every method raises `WorkerUnavailable` while
    there is nobody, and those that change something `RolloutRunning` while a rollout runs."""

    async def add_worker(self, role: Role) -> str:
        """Start one more worker of this role. Returns its name at once; it serves when it is in the
        membership. Raises `InvalidInput`."""
        ...

    async def set_role(self, worker_id: str, role: Role) -> None:
        """Use a worker in this role from now on. Raises `UnknownWorker` and `InvalidInput`."""
        ...

    async def remove_worker(self, worker_id: str, drain_s: float) -> bool:
        """Give a worker nothing new, and end it when it has nothing left to do, or after `drain_s`.

        Returns whether it had nothing left. Raises `UnknownWorker` and `InvalidInput`.
        """
        ...

    async def scale(self, role: Role, count: int, drain_s: float) -> ScaleOutcome:
        """Have so many workers in this role. Answers at once. Raises `InvalidInput`."""
        ...

    async def apply(self, config: ClusterConfig, drain_s: float) -> RolloutReport:
        """Begin to run under another configuration. Raises `ConfigError`."""
        ...

    async def restart(self, worker_ids: Sequence[str], drain_s: float) -> RolloutReport:
        """Begin to replace these workers, all if none is named, by new processes.

        Raises `UnknownWorker`.
        """
        ...

    async def rollout(self) -> RolloutReport:
        """How far the last rollout is."""
        ...
