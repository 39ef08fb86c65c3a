"""One member as the supervisor's state has it: where it is in its life, and what becomes of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from cluster.cluster_record import MemberRecord
from cluster.members import RouterInfo, RouterSpec
from kvferry.config import WorkersConfig
from kvferry.limits import HEALTH_SILENCE_MAX_S, UNREACHED_MAX_S
from kvferry.membership import WorkerInfo

if TYPE_CHECKING:
    from cluster.members import MemberInfo, MemberSpec
    from kvferry.membership import Role


class Phase(Enum):
    """Where a member is in its life."""

    WAITING = "waiting"
    """Not running; started when its backoff is over."""
    STARTING = "starting"
    RUNNING = "running"
    STOPPED = "stopped"
    """Not wanted any more."""


@dataclass(frozen=True, slots=True)
class MemberReport:
    """One member as an operator wants to see it."""

    name: str
    phase: Phase
    launches: int
    info: MemberInfo | None
    last_end: str
    """Why the last launch ended; "" before the first end."""
    failed_for_good: bool
    """True: it ended in a way that no further launch can cure."""
    is_draining: bool = False
    revision: int = 0
    """Of the configuration that it runs under."""


@dataclass(frozen=True, slots=True)
class Living:
    """A process that was found when a supervisor took over."""

    name: str
    launch: int
    info: MemberInfo | None
    """None: it is being started, or has not said anything."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What members that are made from now on are like."""

    groups: WorkersConfig = field(default_factory=WorkersConfig)
    backoff_s: float = 0.5
    revision: int = 0
    lineage: int = 0


@dataclass(slots=True)
class Member:
    """Mutable; `ClusterState` alone changes it."""

    spec: MemberSpec
    phase: Phase = Phase.WAITING
    launch: int = 0
    due: float = 0.0
    """Waiting: time of the next launch. Starting or running: when silence becomes too long."""
    started_at: float = 0.0
    failures: int = 0
    """Launches that ended since one of them last ran for long enough."""
    info: MemberInfo | None = None
    role: Role | None = None
    """What routers use it for; None: for what it was made."""
    drain_s: float | None = None
    """It drains, and has been given so long. None: it stays."""
    renewal: MemberSpec | None = None
    """It is started again as this when it has drained. None: it leaves."""
    replaces: str = ""
    """The member whose place it takes, as long as that is there."""
    last_end: str = ""
    has_run: bool = False
    failed_for_good: bool = False
    is_unreached: bool = False
    """Running, as far as is known, but there is no connection to it."""

    def run(self, info: MemberInfo, now: float) -> None:
        """It serves."""
        self.phase = Phase.RUNNING
        self.has_run = True
        self.started_at = now
        self.info = info
        self.hear(now)
        if isinstance(info, RouterInfo) and isinstance(self.spec, RouterSpec):
            # Clients know the router by its ports: every later launch asks for the same ones.
            self.spec = dataclasses.replace(self.spec, port=info.port, http_port=info.http_port)

    def hear(self, now: float) -> None:
        """It has shown that it makes progress."""
        self.is_unreached = False
        self.due = now + HEALTH_SILENCE_MAX_S

    def lose(self, now: float) -> None:
        """There is no connection to it; said again, it has no more time for that."""
        if not self.is_unreached:
            self.is_unreached = True
            self.due = min(self.due, now + UNREACHED_MAX_S)

    def grant(self, now: float) -> None:
        """Its silence counts from now on."""
        patience_s = UNREACHED_MAX_S if self.is_unreached else HEALTH_SILENCE_MAX_S
        self.due = max(self.due, now + patience_s)

    @property
    def is_draining(self) -> bool:
        """Whether it is given nothing new."""
        return self.drain_s is not None

    @property
    def is_launched(self) -> bool:
        """Whether there is a process, as far as is known."""
        return self.phase in (Phase.STARTING, Phase.RUNNING)

    def told_info(self) -> MemberInfo | None:
        """As routers are told of it."""
        info = self.info
        if not isinstance(info, WorkerInfo):
            return info
        role = info.role if self.role is None else self.role
        return dataclasses.replace(info, role=role, is_draining=self.is_draining)

    def report(self) -> MemberReport:
        """As an operator wants to see it."""
        return MemberReport(
            self.spec.name,
            self.phase,
            self.launch,
            self.told_info(),
            self.last_end,
            self.failed_for_good,
            self.is_draining,
            self.spec.revision,
        )

    def record(self) -> MemberRecord:
        """What a later supervisor has to know of it."""
        return MemberRecord(
            self.spec, self.launch, self.role, self.drain_s, self.renewal, self.replaces
        )


def member_of(record: MemberRecord, due: float) -> Member:
    """As it is known before anything is heard of it: waiting, to be started at `due`."""
    return Member(
        record.spec,
        due=due,
        launch=record.launch,
        role=record.role,
        drain_s=record.drain_s,
        renewal=record.renewal,
        replaces=record.replaces,
        has_run=record.launch > 0,
    )
