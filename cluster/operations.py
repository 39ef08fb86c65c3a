"""What an operator may order of a cluster that runs: more or fewer workers, other roles, another
configuration.

One rollout at a time; while it runs, whoever else wants to change who is in the cluster is refused.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from typing import TYPE_CHECKING

from cluster.member_state import Phase, Settings
from cluster.members import RouterSpec, WorkerSpec
from cluster.roller import Roller
from cluster.rollout import progress
from cluster.rollout_plan import (
    RolloutPhase,
    RolloutPlan,
    RolloutState,
    change_between,
    concerned,
    decoding_first,
    with_hosts_of,
)
from kvferry.errors import (
    ConfigError,
    InvalidInput,
    RolloutRunning,
    UnknownWorker,
    WorkerUnavailable,
)
from kvferry.membership import Role
from router.cluster_control import RolloutReport, ScaleOutcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.members import MemberSpec
    from cluster.supervisor import Supervisor
    from kvferry.config import ClusterConfig
    from kvferry.ids import WorkerId

_log = logging.getLogger(__name__)


class Operations:
    """Carries out orders, on the loop of the supervisor."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._state = supervisor.state
        self._configs = supervisor.configs

    def go_on(self) -> None:
        """With a rollout that was under way when an earlier supervisor ended."""
        rollout = self._supervisor.rollout
        if rollout is not None and rollout.is_running:
            self._supervisor.set_off(Roller(self._supervisor, rollout.plan).run())

    async def add_worker(self, role: Role) -> WorkerId:
        """Start one more worker. Returns its name, at once. Raises `InvalidInput`."""
        self._check_free()
        worker_id = self._state.add_worker(role)
        await self._carried_out()
        return worker_id

    async def set_role(self, worker_id: str, role: Role) -> None:
        """Have routers use a worker for something else. Nothing that runs is disturbed.

        Raises `UnknownWorker` and `InvalidInput`.
        """
        self._check_free()
        self._state.set_role(worker_id, role)
        await self._carried_out()

    async def remove_worker(self, worker_id: str, drain_s: float) -> bool:
        """Give a worker nothing new, wait up to `drain_s` until it has nothing left to do, end it.

        Returns whether it had nothing left; if not, its requests go on elsewhere. The removal goes
        on when its caller does not wait for it. Raises `UnknownWorker` and `InvalidInput`, and
        `WorkerUnavailable` when the cluster stops meanwhile.
        """
        self._check_free()
        version = self._state.drain(worker_id, drain_s)
        removal = self._supervisor.spawn(self._supervisor.take_out(worker_id, version, drain_s))
        await self._supervisor.recorder.save()
        await asyncio.wait({removal})
        if removal.cancelled():
            raise WorkerUnavailable("the cluster is stopping")
        return removal.result()

    async def scale(self, role: Role, count: int, drain_s: float) -> ScaleOutcome:
        """Have so many workers used in this role: start some, or drain some and end them.

        Answers at once. Raises `InvalidInput`, and then nothing is changed.
        """
        self._check_free()
        outcome = self._scale(role, count, drain_s)
        await self._carried_out()
        return outcome

    async def apply(self, config: ClusterConfig, drain_s: float) -> RolloutReport:
        """Have the cluster run under another configuration. Returns at once; `report` tells how far
        it is. Raises `ConfigError` for a setting that cannot be changed, `RolloutRunning`."""
        self._check_free()
        config = with_hosts_of(self._configs.current, config)
        change = change_between(self._configs.current, config)
        if change.replaces_routers:
            await self._check_hand_over(change.of_routers)
        specs = self._staying()
        former_lineage = self._state.settings.lineage
        workers, routers = concerned(specs, self._configs.by_revision, config)
        victims = {
            name for role, count in change.counts.items() for name in self._surplus(role, count)
        }
        former = self._configs.revision
        revision = self._configs.add(config)
        self._use(config, revision, revision if change.is_new_lineage else former_lineage)
        for role, count in change.counts.items():
            self._scale(role, count, drain_s)
        plan = RolloutPlan(
            revision=revision,
            former_revision=former,
            former_lineage=former_lineage,
            workers=tuple(name for name in workers if name not in victims),
            routers=routers,
            is_new_lineage=change.is_new_lineage,
            drain_s=drain_s,
            changes=change.names,
        )
        return await self._roll(plan)

    async def _check_hand_over(self, names: Sequence[str]) -> None:
        """Raises `ConfigError` where a router's ports cannot go to a successor."""
        routers = [spec for spec in self._staying() if isinstance(spec, RouterSpec)]
        launcher = self._supervisor.launcher
        if len(routers) > 1 or not all([await launcher.has_room(spec) for spec in routers]):
            what = "one of several routers" if len(routers) > 1 else "a router on one of many nodes"
            problem = f"needs new routers, and the ports of {what} cannot go to a successor"
            raise ConfigError(
                names[0], f"{problem}: end the cluster with `kvferry down` and start it again"
            )

    async def restart(self, names: Sequence[str], drain_s: float) -> RolloutReport:
        """Replace these workers, all of them if none is named, by new processes, as `apply` does.

        Raises `UnknownWorker`, `InvalidInput` for one that drains, and `RolloutRunning`.
        """
        self._check_free()
        workers = {spec.name: spec for spec in self._staying() if isinstance(spec, WorkerSpec)}
        for name in names:
            if name not in workers:
                raise UnknownWorker(name, workers)
        chosen = [workers[name] for name in dict.fromkeys(names)] or list(workers.values())
        former, settings = self._configs.revision, self._state.settings
        revision = self._configs.add(self._configs.current)
        self._use(self._configs.current, revision, settings.lineage)
        plan = RolloutPlan(
            revision=revision,
            former_revision=former,
            former_lineage=settings.lineage,
            workers=decoding_first(chosen),
            routers=(),
            is_new_lineage=False,
            drain_s=drain_s,
        )
        return await self._roll(plan)

    async def rollout(self) -> RolloutReport:
        """How far the last rollout is."""
        return self.report()

    def report(self) -> RolloutReport:
        """The same, at once."""
        rollout = self._supervisor.rollout
        if rollout is None:
            return RolloutReport(RolloutPhase.DONE.value, self._configs.revision, 0, 0, "", ())
        done, total = progress(rollout.plan, self._state.members)
        doing = self._supervisor.doing if rollout.is_running else rollout.reason
        return RolloutReport(
            rollout.phase, rollout.plan.revision, done, total, doing, rollout.plan.changes
        )

    def _check_free(self) -> None:
        self._supervisor.check_running()
        rollout = self._supervisor.rollout
        if rollout is not None and rollout.is_running:
            raise RolloutRunning(rollout.plan.revision)

    async def _carried_out(self) -> None:
        await self._supervisor.announce()
        await self._supervisor.recorder.save()

    def _use(self, config: ClusterConfig, revision: int, lineage: int) -> None:
        settings = Settings(config.workers, config.restart_backoff_s, revision, lineage)
        self._state.use(settings)

    async def _roll(self, plan: RolloutPlan) -> RolloutReport:
        rollout = RolloutState(plan)
        if not plan.workers and not plan.routers:
            rollout = dataclasses.replace(rollout, phase=RolloutPhase.DONE.value)
        self._supervisor.rollout = rollout
        _log.info("rollout", extra={"plan": str(plan)})
        self.go_on()
        await self._carried_out()
        return self.report()

    def _staying(self) -> list[MemberSpec]:
        members = self._state.members.values()
        return [member.spec for member in members if not member.is_draining]

    def _scale(self, role: Role, count: int, drain_s: float) -> ScaleOutcome:
        surplus = self._surplus(role, count)
        missing = count - len(self._used_as(role)) + len(surplus)
        added = tuple(self._state.add_worker(role) for _ in range(missing))
        for name in surplus:
            version = self._state.drain(name, drain_s)
            self._supervisor.set_off(self._supervisor.take_out(name, version, drain_s))
        return ScaleOutcome(added, surplus)

    def _used_as(self, role: Role) -> list[str]:
        return [
            name
            for name, member in self._state.members.items()
            if isinstance(member.spec, WorkerSpec)
            and not member.is_draining
            and (member.spec.role if member.role is None else member.role) is role
        ]

    def _surplus(self, role: Role, count: int) -> tuple[str, ...]:
        """Who leaves: first those that do not run, then the youngest. Raises `InvalidInput` if
        nobody who decodes were left."""
        names = self._used_as(role)
        if len(names) <= count:
            return ()
        members = self._state.members
        by_use = sorted(names, key=lambda name: members[name].phase is Phase.RUNNING)
        idle = [name for name in by_use if members[name].phase is not Phase.RUNNING]
        running = [name for name in names if name not in idle]
        leaving = [*reversed(idle), *reversed(running)][: len(names) - count]
        others = self._decoding() - set(leaving)
        if role is not Role.PREFILL and not others:
            problem = f"is {count}; nobody running who decodes would be left"
            raise InvalidInput("count", problem)
        return tuple(leaving)

    def _decoding(self) -> set[str]:
        return {
            info.worker_id
            for info in self._state.membership.workers
            if info.role is not Role.PREFILL and not info.is_draining
        }
