"""Desired against observed state of a cluster's processes: decides, and does nothing itself.

Input are reports (`started`, `ended`, `heard`) and time; output are effects in order. Every start
of a member has a number, its *launch*; a report about another launch than the current one is
late, counted and ignored. Per member:

    waiting --due--> starting --started--> running
       ^                |                     |
       +------ended-----+--------ended--------+        (backoff, then the next launch)

A member that is not heard of for `HEALTH_SILENCE_MAX_S` is killed and counts as ended; one to
which there is no connection, after `UNREACHED_MAX_S`. Until then it may come back as it was. After
that it may not: should it live, its launch and its incarnation are those of the past. Workers that
are running are the membership; its version grows with each change.

An operator may add workers, use one in another role, and take one out: it drains first, and one
that drains is not started again when it ends, unless as something new (its *renewal*). No name is
used twice, so that no report is about another worker.

A supervisor that takes over from one that died begins with the record and with what lives
(`restored`): what lives goes on, and what died meanwhile is started again.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from cluster.member_state import (
    Living,
    Member,
    MemberReport,
    Phase,
    Settings,
    member_of,
)
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
    DRAIN_S,
    RESTART_BACKOFF_MAX_S,
    RESTART_BACKOFF_RESET_S,
    WORKER_START_TIMEOUT_S,
)
from kvferry.membership import Membership, Role, WorkerInfo

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from cluster.cluster_record import MemberRecord
    from kvferry.clock import Clock
    from kvferry.ids import WorkerId


_GROUPS = WorkersConfig()
_ROUTER = "router"


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


class ClusterState:
    """What shall run and what does. Not thread safe; its owner calls it from one place."""

    def __init__(
        self,
        specs: tuple[MemberSpec, ...],
        backoff_s: float,
        clock: Clock,
        groups: WorkersConfig = _GROUPS,
    ) -> None:
        """A cluster that begins. `groups` say how a worker is set up that is added."""
        names = [spec.name for spec in specs]
        assert len(set(names)) == len(names), f"two members share a name: {names}"
        now = clock.now()
        self._members = {spec.name: Member(spec, due=now) for spec in specs}
        self._next_numbers: dict[str, int] = dict(Counter(_kind(spec) for spec in specs))
        """By kind of member: numbers below were given."""
        self._settings = Settings(groups, backoff_s)
        self._clock = clock
        self._version = 0
        self._told: tuple[tuple[int, WorkerInfo], ...] = ()
        """Running workers with their lineages, as of `_version`."""
        self.late_reports = 0

    @classmethod
    def restored(
        cls,
        members: Iterable[MemberRecord],
        next_numbers: Mapping[str, int],
        living: Iterable[Living],
        settings: Settings,
        version: int,
        clock: Clock,
    ) -> ClusterState:
        """A cluster that goes on. `living` are of members that are on record, one launch of each.

        All versions of the membership are above `version`.
        """
        state = cls((), settings.backoff_s, clock, settings.groups)
        state._settings = settings
        now = clock.now()
        state._members = {each.spec.name: member_of(each, now) for each in members}
        state._next_numbers = dict(next_numbers)
        for process in living:
            state._adopt(state._members[process.name], process, now)
        for member in tuple(state._members.values()):
            if member.is_draining and not member.is_launched:
                state._part(member)
        state._version = version
        state._publish(even_if_same=True)
        return state

    @property
    def settings(self) -> Settings:
        """What members that are made now are like."""
        return self._settings

    def use(self, settings: Settings) -> None:
        """Make members like this from now on. What there is stays as it is."""
        self._settings = settings

    @property
    def membership(self) -> Membership:
        """The running workers, in the order of their specifications."""
        return Membership(self._version, tuple(info for _, info in self._told))

    def membership_of(self, lineage: int) -> Membership:
        """Of one lineage, as its routers are told."""
        workers = tuple(info for of, info in self._told if of == lineage)
        return Membership(self._version, workers)

    @property
    def members(self) -> Mapping[str, Member]:
        """All that are wanted or leave, to look at."""
        return MappingProxyType(self._members)

    @property
    def next_numbers(self) -> Mapping[str, int]:
        """For the record."""
        return MappingProxyType(self._next_numbers)

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
        return tuple(member.report() for member in self._members.values())

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
                silence = "unreached" if member.is_unreached else "silent"
                reason = f"{member.phase.value} and {silence} for too long"
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
        member.run(info, self._clock.now())
        self._publish()

    def heard(self, name: str, launch: int) -> None:
        """A running launch has shown that it makes progress."""
        member = self._current(name, launch)
        if member is not None and member.phase is Phase.RUNNING:
            member.hear(self._clock.now())

    def unreached(self, name: str, launch: int) -> None:
        """There is no connection to a running launch; `heard` says that there is one again."""
        member = self._current(name, launch)
        if member is not None and member.phase is Phase.RUNNING:
            member.lose(self._clock.now())

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

    def add_worker(self, role: Role, replaces: str = "", *, reserves: bool = False) -> WorkerId:
        """One more of this role's group, to be launched at once. Returns its name.

        `replaces`: whose place it is to take, and in whose role it is used. `reserves`: it has what
        it needs to itself; else it shares CPUs with the others, because what Ray has was set when
        it started. Raises `InvalidInput` for a role that this cluster does not know.
        """
        self._check_role(role)
        group = group_of(self._settings.groups, role)
        number = self._next_number(role.value)
        spec = self._of_now(worker_spec(role, number, group))
        assert isinstance(spec, WorkerSpec)
        if not reserves:
            spec = dataclasses.replace(spec, cpus=0.0)
        member = Member(spec, due=self._clock.now(), replaces=replaces)
        if replaces:
            member.role = self._members[replaces].role
        self._members[spec.name] = member
        return spec.worker_id

    def add_router(self, replaces: str) -> str:
        """One more router, which takes over the ports of another one. Returns its name."""
        former = self._members[replaces].spec
        assert isinstance(former, RouterSpec), f"{replaces} is no router"
        name = f"{_ROUTER}-{self._next_number(_ROUTER)}"
        spec = self._of_now(dataclasses.replace(former, name=name, is_successor=True))
        self._members[name] = Member(spec, due=self._clock.now(), replaces=replaces)
        return name

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

    def drain(self, worker_id: str, drain_s: float = DRAIN_S) -> int | None:
        """Routers give a worker nothing new from now on, and it is not started again.

        Returns the version of the membership that says so; None for one that is not running, which
        has nothing to end. Raises `UnknownWorker`, and `InvalidInput` for one that drains already
        and if nobody were left who decodes.
        """
        member = self._staying(worker_id)
        self._check_others_decode(member)
        return self._begin_drain(member, drain_s)

    def renew(self, worker_id: str, drain_s: float) -> int | None:
        """As `drain`, but it is started again under its name when it has drained, as workers are
        made now."""
        member = self._staying(worker_id)
        self._check_others_decode(member)
        assert isinstance(member.spec, WorkerSpec)
        number = int(worker_id.rpartition("-")[2])
        group = group_of(self._settings.groups, member.spec.role)
        member.renewal = self._of_now(worker_spec(member.spec.role, number, group))
        return self._begin_drain(member, drain_s)

    def retire_router(self, name: str, drain_s: float) -> None:
        """A router takes nothing new from now on, and is not started again."""
        self._begin_drain(self._members[name], drain_s)

    def can_spare(self, worker_id: str) -> bool:
        """Whether somebody else decodes for the routers that know this worker."""
        try:
            self._check_others_decode(self._members[worker_id])
        except InvalidInput:
            return False
        return True

    def is_running(self, name: str) -> bool:
        """Whether a member of that name runs."""
        member = self._members.get(name)
        return member is not None and member.phase is Phase.RUNNING

    def remove(self, name: str) -> Stop | None:
        """One that drains is part of the cluster no more. Its process, to be stopped, if any; one
        that has ended meanwhile is gone already. One that comes back waits for `return_renewed`."""
        member = self._members.get(name)
        if member is None or not member.is_draining:
            return None
        stop = Stop(name, member.launch) if member.is_launched else None
        member.phase = Phase.STOPPED
        member.info = None
        if member.renewal is None or stop is None:
            self._part(member)
        self._publish()
        return stop

    def return_renewed(self, name: str) -> None:
        """The process of one that was removed is gone; if it comes back, now."""
        member = self._members.get(name)
        if member is not None and member.is_draining and member.phase is Phase.STOPPED:
            self._part(member)
            self._publish()

    def give_up(self, name: str, spec: MemberSpec | None) -> Stop | None:
        """Something new did not come up: it goes, or becomes `spec` again. Its process, to be
        stopped, if any."""
        member = self._members[name]
        member.drain_s, member.renewal = 0.0, spec
        return self.remove(name)

    def grant_time(self) -> None:
        """Nobody could be heard for a while, for which nobody is to blame."""
        now = self._clock.now()
        for member in self._members.values():
            if member.phase is Phase.RUNNING:
                member.grant(now)

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
        groups = self._settings.groups
        hands_off = groups.prefill.count + groups.decode.count > 0
        if role is not Role.BOTH and not hands_off:
            # Such workers may keep less KV than a handoff takes (`window_of_kv`).
            raise InvalidInput("role", "must be both: this cluster was started without handoffs")

    def _staying(self, worker_id: str) -> Member:
        member = self._members.get(worker_id)
        if member is None or not isinstance(member.spec, WorkerSpec):
            known = [m.spec.name for m in self._members.values() if isinstance(m.spec, WorkerSpec)]
            raise UnknownWorker(worker_id, known)
        if member.is_draining:
            raise InvalidInput("worker_id", f"{worker_id} is being taken out already")
        return member

    def _check_others_decode(self, member: Member) -> None:
        lineage = member.spec.lineage
        if not self._is_used(lineage):
            return
        decoding = {
            info.worker_id
            for of, info in self._told
            if of == lineage and info.role is not Role.PREFILL and not info.is_draining
        }
        if decoding == {member.spec.name}:
            problem = f"{member.spec.name} is the only one running that decodes"
            raise InvalidInput("worker_id", problem)

    def _is_used(self, lineage: int) -> bool:
        """Whether some router is told of its workers. Once none is, they have nothing to do."""
        specs = [member.spec for member in self._members.values()]
        return lineage == self._settings.lineage or any(
            isinstance(spec, RouterSpec) and spec.lineage == lineage for spec in specs
        )

    def _next_number(self, kind: str) -> int:
        number = self._next_numbers.get(kind, 0)
        self._next_numbers[kind] = number + 1
        return number

    def _of_now(self, spec: MemberSpec) -> MemberSpec:
        settings = self._settings
        return dataclasses.replace(spec, revision=settings.revision, lineage=settings.lineage)

    def _begin_drain(self, member: Member, drain_s: float) -> int | None:
        member.drain_s = drain_s
        self._publish()
        return self._version if member.phase is Phase.RUNNING else None

    def _adopt(self, member: Member, process: Living, now: float) -> None:
        member.launch = process.launch
        member.has_run = True
        if process.info is None:
            member.phase = Phase.STARTING
            member.due = now + WORKER_START_TIMEOUT_S
        else:
            member.run(process.info, now)

    def _current(self, name: str, launch: int) -> Member | None:
        member = self._members.get(name)
        if member is None:
            self.late_reports += 1
            return None
        assert launch <= member.launch, f"{name}: launch {launch} was never asked for"
        if launch == member.launch:
            return member
        self.late_reports += 1
        return None

    def _end(self, member: Member, reason: str) -> None:
        now = self._clock.now()
        if member.phase is Phase.RUNNING and now - member.started_at >= RESTART_BACKOFF_RESET_S:
            member.failures = 0
        wait_s = min(self._settings.backoff_s * 2**member.failures, RESTART_BACKOFF_MAX_S)
        # Above 32 the wait is at its bound; without a cap a float would overflow one day.
        member.failures = min(member.failures + 1, 32)
        member.phase = Phase.WAITING
        member.is_unreached = False
        member.info = None
        member.due = now + wait_s
        member.last_end = reason
        if member.is_draining:
            self._part(member)

    def _part(self, member: Member) -> None:
        """One that drains has no process any more: it is gone, or begins anew."""
        if member.renewal is None:
            del self._members[member.spec.name]
            for other in self._members.values():
                if other.replaces == member.spec.name:
                    other.replaces = ""
            return
        fresh = Member(member.renewal, due=self._clock.now(), launch=member.launch)
        fresh.role, fresh.last_end = member.role, member.last_end
        self._members[member.spec.name] = fresh

    def _publish(self, *, even_if_same: bool = False) -> None:
        told = tuple(
            (member.spec.lineage, info)
            for member in self._members.values()
            if isinstance(info := member.told_info(), WorkerInfo)
        )
        if told != self._told or even_if_same:
            self._version += 1
            self._told = told


def _kind(spec: MemberSpec) -> str:
    return spec.role.value if isinstance(spec, WorkerSpec) else _ROUTER
