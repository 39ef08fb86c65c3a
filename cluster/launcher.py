"""What the supervisor asks of processes, whatever starts them (Ray, or a fake in tests)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from cluster.members import MemberInfo, MemberSpec
    from kvferry.config import ClusterConfig
    from kvferry.membership import Membership


class NoAnswer(Exception):
    """A call of a member came to nothing; the message says how."""


class MemberEnded(NoAnswer):
    """The process is gone."""


class MemberUnreached(NoAnswer):
    """Nobody answers there now. The process may live, behind a network that is cut, and answer
    again; whether the call was carried out is not known."""


@dataclass(frozen=True, slots=True)
class StartRefused:
    """The process runs but cannot serve."""

    reason: str
    for_good: bool
    """True: the configuration is at fault, so that another start would end alike."""


StartOutcome: TypeAlias = "MemberInfo | StartRefused"


class MemberHandle(Protocol):
    """One launched process. Every coroutine raises `MemberEnded` when the process is gone, and
    `MemberUnreached` when that is not known."""

    async def start(self) -> StartOutcome:
        """Load and serve; returns when ready. Asked again, also by another supervisor, it has no
        further effect and tells the same."""
        ...

    async def describe(self) -> MemberInfo | None:
        """What `start` told; None: it has not ended yet, or was never called."""
        ...

    async def wait_until_ended(self) -> None:
        """Pends while the process lives, so that its death is known within milliseconds."""
        ...

    async def is_alive(self) -> bool:
        """Whether the process makes progress. Called about once a second."""
        ...

    async def set_membership(self, membership: Membership) -> None:
        """Tell a router who is there. Never called on workers."""
        ...

    async def reached_workers(self) -> tuple[str, ...]:
        """The workers that a router can reach now. Never called on workers."""
        ...

    async def has_work_at(self, worker_id: str) -> bool:
        """Whether a router, or that worker itself, knows of something it has to do or may have.
        Never called on workers."""
        ...

    async def retire(self, grace_s: float) -> None:
        """Leave a router's ports to its successor, and end what it has, at most `grace_s` long.
        Never called on workers."""
        ...

    async def stop(self) -> None:
        """End requests, close ports, free memory. The process itself is ended by `kill`."""
        ...

    async def kill(self) -> None:
        """End the process by force, at once. No effect if it is gone."""
        ...


@dataclass(frozen=True, slots=True)
class FoundProcess:
    """One that lives, whoever has launched it."""

    name: str
    launch: int
    handle: MemberHandle


class Launcher(Protocol):
    """Starts processes, and finds those that were started."""

    async def launch(self, spec: MemberSpec, launch: int, config: ClusterConfig) -> MemberHandle:
        """Start the process of a member. Its `start` method is not called yet."""
        ...

    async def living(self) -> list[FoundProcess]:
        """All processes of the cluster's members. Raises `WorkerUnavailable` if nobody can tell."""
        ...

    async def has_room(self, spec: MemberSpec) -> bool:
        """Whether what a member is to have for itself is free now."""
        ...
