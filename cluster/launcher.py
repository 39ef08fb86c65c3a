"""What the supervisor asks of processes, whatever starts them (Ray, or a fake in tests)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from cluster.members import MemberInfo, MemberSpec
    from kvferry.membership import Membership


class MemberEnded(Exception):
    """The process is gone; the message says how."""


@dataclass(frozen=True, slots=True)
class StartRefused:
    """The process runs but cannot serve."""

    reason: str
    for_good: bool
    """True: the configuration is at fault, so that another start would end alike."""


StartOutcome: TypeAlias = "MemberInfo | StartRefused"


class MemberHandle(Protocol):
    """One launched process. Every coroutine raises `MemberEnded` when the process is gone."""

    async def start(self) -> StartOutcome:
        """Load and serve; returns when ready. Called once, first."""
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

    async def stop(self) -> None:
        """End requests, close ports, free memory. The process itself is ended by `kill`."""
        ...

    def kill(self) -> None:
        """End the process by force, at once. No effect if it is gone."""
        ...


class Launcher(Protocol):
    """Starts processes."""

    def launch(self, spec: MemberSpec, launch: int) -> MemberHandle:
        """Start the process of a member. Its `start` method is not called yet."""
        ...
