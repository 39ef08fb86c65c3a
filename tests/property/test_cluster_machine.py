"""Deaths, supervisors that end and take over, and orders, in any order.

No wanted member is lost, no name has two processes, no version of the membership comes twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cluster.cluster_record import ClusterRecord, record_from_json
from cluster.cluster_state import ClusterState, Kill, Launch, Stop
from cluster.member_state import Living, Phase, Settings
from cluster.members import MemberInfo, RouterInfo, RouterSpec, WorkerSpec, members_of
from kvferry.clock import ManualClock
from kvferry.config import config_from_mapping
from kvferry.errors import InvalidInput, UnknownWorker
from kvferry.ids import Incarnation
from kvferry.limits import RESTART_BACKOFF_MAX_S
from kvferry.membership import Role, WorkerInfo

CONFIG = config_from_mapping({"workers": {"prefill": {"count": 1}, "decode": {"count": 2}}})
SOME = st.integers(0, 2**16)


@dataclass
class Process:
    """One that lives."""

    name: str
    launch: int
    spec: Any
    info: MemberInfo | None = None
    is_cut_off: bool = False


class ClusterMachine(RuleBasedStateMachine):
    """A world of processes that do as they are told, and one supervisor's state after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock(100.0)
        self.processes: list[Process] = []
        self.incarnations = 0
        self.starts = 1
        self.told = -1
        """Version of the membership that the router uses."""
        self.wanted: set[str] = set()
        """By orders that were answered."""
        self.removing: dict[str, WorkerSpec] = {}

    @initialize()
    def begin(self) -> None:
        specs = members_of(CONFIG)
        self.state = ClusterState(specs, 0.5, self.clock, CONFIG.workers)
        self.wanted = {spec.name for spec in specs}
        self.save()

    def save(self) -> None:
        settings = self.state.settings
        self.record = ClusterRecord(
            starts=self.starts,
            configs={0: CONFIG},
            revision=settings.revision,
            lineage=settings.lineage,
            members=tuple(member.record() for member in self.state.members.values()),
            next_numbers=dict(self.state.next_numbers),
        ).to_json()

    def end(self, name: str, launch: int) -> None:
        self.processes = [p for p in self.processes if (p.name, p.launch) != (name, launch)]

    @rule(seconds=st.sampled_from([0.1, 1.0, 20.0]), is_saved=st.booleans())
    def time_passes(self, seconds: float, is_saved: bool) -> None:
        self.clock.advance(seconds)
        for process in self.processes:
            report = self.state.unreached if process.is_cut_off else self.state.heard
            report(process.name, process.launch)
        self.carry_out()
        if is_saved:
            self.save()

    def carry_out(self) -> None:
        for effect in self.state.due():
            match effect:
                case Launch(spec, launch):
                    self.processes.append(Process(spec.name, launch, spec))
                case Kill(name, launch, _):
                    self.end(name, launch)

    @rule(which=SOME)
    def one_serves(self, which: int) -> None:
        starting = [process for process in self.processes if process.info is None]
        if starting:
            self.serve(starting[which % len(starting)])

    def serve(self, process: Process) -> None:
        self.incarnations += 1
        if isinstance(process.spec, RouterSpec):
            process.info = RouterInfo(process.name, "127.0.0.1", 7000, 7001, 1)
            self.told = -1
        else:
            process.info = WorkerInfo(
                process.spec.worker_id,
                process.spec.role,
                Incarnation(self.incarnations),
                "127.0.0.1:1",
            )
        self.state.started(process.name, process.launch, process.info)

    @rule(which=SOME, is_noticed=st.booleans())
    def one_dies(self, which: int, is_noticed: bool) -> None:
        """Unnoticed: the supervisor ends before it is told."""
        if not self.processes:
            return
        process = self.processes[which % len(self.processes)]
        self.end(process.name, process.launch)
        if is_noticed:
            self.state.ended(process.name, process.launch, "killed")
        else:
            self.supervisor_ends()

    @rule(which=SOME)
    def one_is_cut_off_or_back(self, which: int) -> None:
        if self.processes:
            process = self.processes[which % len(self.processes)]
            process.is_cut_off = not process.is_cut_off

    @rule()
    def supervisor_ends(self) -> None:
        record = record_from_json(self.record)
        known = {member.spec.name for member in record.members}
        newest: dict[str, Process] = {}
        for process in sorted(self.processes, key=lambda each: each.launch):
            if process.name in known:
                newest[process.name] = process
        self.processes = list(newest.values())
        living = [Living(each.name, each.launch, each.info) for each in self.processes]
        self.starts = record.starts + 1
        self.state = ClusterState.restored(
            record.members,
            record.next_numbers,
            living,
            Settings(CONFIG.workers, 0.5),
            record.first_version,
            self.clock,
        )
        self.removing = {
            name: member.spec
            for name, member in self.state.members.items()
            if member.is_draining and isinstance(member.spec, WorkerSpec)
        }
        self.save()

    @rule(role=st.sampled_from(Role))
    def one_is_added(self, role: Role) -> None:
        name = self.state.add_worker(role)
        assert name not in self.wanted, "a name is used twice"
        self.wanted.add(name)
        self.save()

    @rule(which=SOME, role=st.sampled_from(Role))
    def one_changes_its_role(self, which: int, role: Role) -> None:
        name = self.some_worker(which)
        try:
            self.state.set_role(name, role)
        except (InvalidInput, UnknownWorker):
            return
        self.save()

    @rule(which=SOME, comes_back=st.booleans())
    def one_drains(self, which: int, comes_back: bool) -> None:
        name = self.some_worker(which)
        try:
            if comes_back:
                self.state.renew(name, 10.0)
            else:
                self.state.drain(name, 10.0)
        except (InvalidInput, UnknownWorker):
            return
        spec = self.state.members[name].spec
        assert isinstance(spec, WorkerSpec)
        self.removing[name] = spec
        if not comes_back:
            self.wanted.discard(name)
        self.save()

    @rule(which=SOME, is_saved=st.booleans())
    def one_has_drained(self, which: int, is_saved: bool) -> None:
        if not self.removing:
            return
        name = sorted(self.removing)[which % len(self.removing)]
        del self.removing[name]
        stop = self.state.remove(name)
        if stop is not None:
            assert isinstance(stop, Stop)
            self.end(stop.name, stop.launch)
        self.state.return_renewed(name)
        if is_saved:
            self.save()

    def some_worker(self, which: int) -> str:
        names = [
            name
            for name, member in self.state.members.items()
            if isinstance(member.spec, WorkerSpec)
        ]
        return names[which % len(names)] if names else "nobody"

    @invariant()
    def nobody_is_there_twice(self) -> None:
        names = [process.name for process in self.processes]
        assert len(names) == len(set(names)), self.processes

    @invariant()
    def versions_grow(self) -> None:
        if not hasattr(self, "state"):
            return
        version = self.state.membership.version
        assert version >= self.told
        self.told = version

    @invariant()
    def routers_hear_of_living_workers(self) -> None:
        if not hasattr(self, "state"):
            return
        living = {
            process.info.incarnation
            for process in self.processes
            if isinstance(process.info, WorkerInfo)
        }
        assert {info.incarnation for info in self.state.membership.workers} <= living

    def teardown(self) -> None:
        if not hasattr(self, "state"):
            return
        for name in tuple(self.removing):
            self.one_has_drained(0, is_saved=True)
            assert name not in self.removing or self.removing
        for _ in range(4):
            self.clock.advance(RESTART_BACKOFF_MAX_S)
            for process in self.processes:
                self.state.heard(process.name, process.launch)
            self.carry_out()
            for process in tuple(self.processes):
                if process.info is None:
                    self.serve(process)
        members = self.state.members
        assert self.wanted <= set(members), "a wanted member is lost"
        running = {name for name, each in members.items() if each.phase is Phase.RUNNING}
        assert self.wanted <= running, "a wanted member is not started"


TestClusterMachine = ClusterMachine.TestCase
