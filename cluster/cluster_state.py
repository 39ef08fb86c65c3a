"""Desired against observed state of a cluster's processes: decides, and does nothing itself.

Input are reports (`started`, `ended`, `heard`) and time; output are effects in order. Every start
of a member has a number, its *launch*; a report about another launch than the current one is
late, counted and ignored. Per member:

    waiting --due--> starting --started--> running
       ^                |                     |
       +------ended-----+--------ended--------+        (backoff, then the next launch)

A member that is not heard of for `HEALTH_SILENCE_MAX_S` is killed and counts as ended. Workers
that are running are the membership; its version grows with each change.

An operator may add workers, use one in another role, and take one out: it drains first, and one
that drains is not started again when it ends. No name is used twice, so that no report is about
another worker.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from cluster.members import (
    MemberInfo,
    MemberSpec,
    RouterInfo,
    RouterSpec,
    WorkerSpec,
    group_of,
    worker_spec,
)
from kvferry.config import WorkersConfig
from kvferry.errors import InvalidInput, UnknownWorker
from kvferry.limits import (
    HEALTH_SILENCE_MAX_S,
    RESTART_BACKOFF_MAX_S,
    RESTART_BACKOFF_RESET_S,
    WORKER_START_TIMEOUT_S,
)
from kvferry.membership import Membership, Role, WorkerInfo

if TYPE_CHECKING:
    from kvferry.clock import Clock
    from kvferry.ids import WorkerId


_GROUPS = WorkersConfig()


class Phase(Enum):
    """Where a member is in its life."""

    WAITING = "waiting"
    """Not running; started when its backoff is over."""
    STARTING = "starting"
    RUNNING = "running"
    STOPPED = "stopped"
    """Not wanted any more."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Start this member, and report on it under this launch number."""

    spec: MemberSpec
    launch: int


@dataclass(frozen=True, slots=True)
class Kill:
    """End this launch's process by force; it is not part of the cluster any more."""

    name: str
    launch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Ask this launch's process to end, and end it by force if it does not."""

    name: str
    launch: int


Effect: TypeAlias = Launch | Kill
"""What `due` asks for. `Stop` comes from `remove` and `shut_down` alone."""


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


@dataclass(slots=True)
class _Member:
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
    is_draining: bool = False
    last_end: str = ""
    has_run: bool = False
    failed_for_good: bool = False

    def told_info(self) -> MemberInfo | None:
        """As routers are told of it."""
        info = self.info
        if not isinstance(info, WorkerInfo):
            return info
        role = info.role if self.role is None else self.role
        return dataclasses.replace(info, role=role, is_draining=self.is_draining)


class ClusterState:
    """What shall run and what does. Not thread safe; its owner calls it from one place."""

    def __init__(
        self,
        specs: tuple[MemberSpec, ...],
        backoff_s: float,
        clock: Clock,
        groups: WorkersConfig = _GROUPS,
    ) -> None:
        """`groups` say how a worker is set up that is added."""
        names = [spec.name for spec in specs]
        assert len(set(names)) == len(names), f"two members share a name: {names}"
        now = clock.now()
        self._members = {spec.name: _Member(spec, due=now) for spec in specs}
        self._names = set(names)
        """All that were ever given."""
        self._groups = groups
        self._backoff_s = backoff_s
        self._clock = clock
        self._membership = Membership(0, ())
        self.late_reports = 0

    @property
    def membership(self) -> Membership:
        """The running workers, in the order of their specifications."""
        return self._membership

    @property
    def is_complete(self) -> bool:
        """Whether every wanted member is running."""
        return all(member.phase is Phase.RUNNING for member in self._members.values())

    def routers(self) -> tuple[RouterInfo, ...]:
        """The running routers."""
        infos = (member.info for member in self._members.values())
        return tuple(info for info in infos if isinstance(info, RouterInfo))

    def reports(self) -> tuple[MemberReport, ...]:
        """All members in the order of their specifications."""
        return tuple(
            MemberReport(
                member.spec.name,
                member.phase,
                member.launch,
                member.told_info(),
                member.last_end,
                member.failed_for_good,
            )
            for member in self._members.values()
        )

    def due(self) -> list[Effect]:
        """Effects whose time has come. Each is returned once."""
        now = self._clock.now()
        effects: list[Effect] = []
        for member in tuple(self._members.values()):
            if member.phase is Phase.STOPPED or member.due > now or member.failed_for_good:
                continue
            if member.phase is Phase.WAITING:
                member.launch += 1
                member.phase = Phase.STARTING
                member.due = now + WORKER_START_TIMEOUT_S
                effects.append(Launch(member.spec, member.launch))
            else:
                reason = f"{member.phase.value} and silent for too long"
                effects.append(Kill(member.spec.name, member.launch, reason))
                self._end(member, reason)
        self._publish()
        return effects

    def next_due(self) -> float | None:
        """When `due` has something to say next; None when only a report can change that."""
        times = [
            member.due
            for member in self._members.values()
            if member.phase is not Phase.STOPPED and not member.failed_for_good
        ]
        return min(times, default=None)

    def started(self, name: str, launch: int, info: MemberInfo) -> None:
        """A launch is ready to serve."""
        member = self._current(name, launch)
        if member is None or member.phase is not Phase.STARTING:
            return
        now = self._clock.now()
        member.phase = Phase.RUNNING
        member.has_run = True
        member.started_at = now
        member.due = now + HEALTH_SILENCE_MAX_S
        member.info = info
        if isinstance(info, RouterInfo) and isinstance(member.spec, RouterSpec):
            # Clients know the router by its ports: every later launch asks for the same ones.
            member.spec = dataclasses.replace(member.spec, port=info.port, http_port=info.http_port)
        self._publish()

    def heard(self, name: str, launch: int) -> None:
        """A running launch has shown that it makes progress."""
        member = self._current(name, launch)
        if member is not None and member.phase is Phase.RUNNING:
            member.due = self._clock.now() + HEALTH_SILENCE_MAX_S

    def ended(self, name: str, launch: int, reason: str, *, for_good: bool = False) -> None:
        """A launch's process is gone. `for_good`: starting it again would fail the same way.

        A member that has run before is tried again all the same: its configuration was good.
        """
        member = self._current(name, launch)
        if member is None or member.phase not in (Phase.STARTING, Phase.RUNNING):
            return
        self._end(member, reason)
        member.failed_for_good = for_good and not member.has_run
        self._publish()

    def add_worker(self, role: Role) -> WorkerId:
        """One more of this role's group, to be launched at once. Returns its name.

        Raises `InvalidInput` for a role that this cluster does not know.
        """
        self._check_role(role)
        number = next(n for n in itertools.count() if f"{role.value}-{n}" not in self._names)
        # What Ray reserves was set when it started; a further worker shares it with the others.
        spec = dataclasses.replace(
            worker_spec(role, number, group_of(self._groups, role)), cpus=0.0
        )
        self._names.add(spec.name)
        self._members[spec.name] = _Member(spec, due=self._clock.now())
        return spec.worker_id

    def set_role(self, worker_id: str, role: Role) -> None:
        """Routers use a worker for this from now on; it goes on with what it has.

        Raises `UnknownWorker`, and `InvalidInput` for a role that this cluster does not know, for a
        worker that drains, and if nobody were left who decodes.
        """
        self._check_role(role)
        member = self._staying(worker_id)
        if role is Role.PREFILL:
            self._check_others_decode(member)
        member.role = role
        self._publish()

    def drain(self, worker_id: str) -> int | None:
        """Routers give a worker nothing new from now on, and it is not started again.

        Returns the version of the membership that says so; None for one that is not running, which
        has nothing to end. Raises `UnknownWorker`, and `InvalidInput` for one that drains already
        and if nobody were left who decodes.
        """
        member = self._staying(worker_id)
        self._check_others_decode(member)
        member.is_draining = True
        self._publish()
        return self._membership.version if member.phase is Phase.RUNNING else None

    def is_running(self, worker_id: str) -> bool:
        """Whether a worker of that name runs."""
        member = self._members.get(worker_id)
        return member is not None and member.phase is Phase.RUNNING

    def remove(self, worker_id: str) -> Stop | None:
        """A worker that drains is part of the cluster no more. Its process, to be stopped, if any;
        one that has ended meanwhile is gone already."""
        member = self._members.pop(worker_id, None)
        if member is None:
            return None
        assert member.is_draining, f"{worker_id}: only what drains is removed"
        self._publish()
        is_launched = member.phase in (Phase.STARTING, Phase.RUNNING)
        return Stop(worker_id, member.launch) if is_launched else None

    def shut_down(self) -> tuple[tuple[Stop, ...], tuple[Stop, ...]]:
        """Nothing is wanted any more. What is to be stopped: routers, and when they have, workers.

        Routers refuse new requests and give running ones a moment, for which workers must live.
        """
        routers: list[Stop] = []
        workers: list[Stop] = []
        for member in self._members.values():
            if member.phase in (Phase.STARTING, Phase.RUNNING):
                stage = routers if isinstance(member.spec, RouterSpec) else workers
                stage.append(Stop(member.spec.name, member.launch))
            member.phase = Phase.STOPPED
            member.info = None
        self._publish()
        return tuple(routers), tuple(workers)

    def _check_role(self, role: Role) -> None:
        hands_off = self._groups.prefill.count + self._groups.decode.count > 0
        if role is not Role.BOTH and not hands_off:
            # Such workers may keep less KV than a handoff takes (`window_of_kv`).
            raise InvalidInput("role", "must be both: this cluster was started without handoffs")

    def _staying(self, worker_id: str) -> _Member:
        member = self._members.get(worker_id)
        if member is None or not isinstance(member.spec, WorkerSpec):
            known = [m.spec.name for m in self._members.values() if isinstance(m.spec, WorkerSpec)]
            raise UnknownWorker(worker_id, known)
        if member.is_draining:
            raise InvalidInput("worker_id", f"{worker_id} is being taken out already")
        return member

    def _check_others_decode(self, member: _Member) -> None:
        workers = self._membership.workers
        decoding = {
            w.worker_id for w in workers if w.role is not Role.PREFILL and not w.is_draining
        }
        if decoding == {member.spec.name}:
            problem = f"{member.spec.name} is the only one running that decodes"
            raise InvalidInput("worker_id", problem)

    def _current(self, name: str, launch: int) -> _Member | None:
        member = self._members.get(name)
        if member is None:
            self.late_reports += 1
            return None
        assert launch <= member.launch, f"{name}: launch {launch} was never asked for"
        if launch == member.launch:
            return member
        self.late_reports += 1
        return None

    def _end(self, member: _Member, reason: str) -> None:
        now = self._clock.now()
        if member.phase is Phase.RUNNING and now - member.started_at >= RESTART_BACKOFF_RESET_S:
            member.failures = 0
        wait_s = min(self._backoff_s * 2**member.failures, RESTART_BACKOFF_MAX_S)
        # Above 32 the wait is at its bound; without a cap a float would overflow one day.
        member.failures = min(member.failures + 1, 32)
        member.phase = Phase.WAITING
        member.info = None
        member.due = now + wait_s
        member.last_end = reason
        if member.is_draining:
            del self._members[member.spec.name]

    def _publish(self) -> None:
        infos = (member.told_info() for member in self._members.values())
        workers = tuple(info for info in infos if isinstance(info, WorkerInfo))
        if workers != self._membership.workers:
            self._membership = Membership(self._membership.version + 1, workers)
