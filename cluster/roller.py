"""Carries out a rollout: asks `cluster.rollout` for the next step until there is none."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

from cluster.member_state import Settings
from cluster.members import WorkerSpec, group_of, worker_spec
from cluster.rollout import (
    Done,
    Drain,
    Fail,
    Replace,
    Retire,
    Succeed,
    Wait,
    new_members,
    next_step,
)
from cluster.rollout_plan import RolloutPhase
from kvferry.limits import ROLLOUT_CHECK_INTERVAL_S

if TYPE_CHECKING:
    from cluster.members import MemberSpec
    from cluster.rollout import Step
    from cluster.rollout_plan import RolloutPlan
    from cluster.supervisor import Supervisor

_log = logging.getLogger(__name__)


class _RolloutFailed(Exception):
    """The message says why, for the operator."""


class Roller:
    """One rollout, on the loop of the supervisor."""

    def __init__(self, supervisor: Supervisor, plan: RolloutPlan) -> None:
        self._supervisor = supervisor
        self._state = supervisor.state
        self._plan = plan
        self._postponed: set[str] = set()

    async def run(self) -> None:
        """Returns when it is over, one way or the other."""
        try:
            while True:
                changes = self._supervisor.view().changes
                step = next_step(
                    self._plan,
                    self._state.members,
                    self._supervisor.routers_told(),
                    frozenset(self._postponed),
                )
                if isinstance(step, Done):
                    break
                await self._take(step)
                await self._supervisor.wait_for_change(changes, ROLLOUT_CHECK_INTERVAL_S)
        except _RolloutFailed as error:
            await self._take_back()
            await self._end(RolloutPhase.FAILED, str(error))
        else:
            await self._end(RolloutPhase.DONE, "")

    async def _take(self, step: Step) -> None:
        match step:
            case Fail(name, reason):
                raise _RolloutFailed(f"{name} does not come up: {reason}")
            case Replace(name, only_beside):
                await self._replace(name, only_beside=only_beside)
            case Drain(name):
                version = self._state.drain(name, self._plan.drain_s)
                self._out(name, version)
            case Succeed(name):
                self._doing(f"{self._state.add_router(name)} takes over from {name}")
                await self._supervisor.announce()
            case Retire(name):
                self._doing(f"{name} finishes what it has")
                self._state.retire_router(name, self._plan.drain_s)
                self._supervisor.set_off(self._supervisor.retire(name, self._plan.drain_s))
            case Wait(what):
                self._doing(what)
            case Done():
                pass

    async def _replace(self, name: str, *, only_beside: bool) -> None:
        spec = self._state.members[name].spec
        assert isinstance(spec, WorkerSpec), f"{name} is no worker"
        group = group_of(self._state.settings.groups, spec.role)
        has_room = await self._supervisor.launcher.has_room(worker_spec(spec.role, 0, group))
        if name not in self._state.members:
            return  # It has left while we asked.
        if has_room:
            self._beside(name, reserves=True)
        elif only_beside:
            self._postponed.add(name)
        elif self._state.can_spare(name):
            self._doing(f"{name} drains, to come back")
            self._out(name, self._state.renew(name, self._plan.drain_s))
        elif group.gpus == 0:
            # CPUs are accounting: better two share them for a while than nobody decodes.
            self._beside(name, reserves=False)
        else:
            problem = f"{name} is the only one that decodes, and there is no GPU for another one"
            raise _RolloutFailed(problem)
        await self._supervisor.announce()

    def _beside(self, name: str, *, reserves: bool) -> None:
        spec = self._state.members[name].spec
        assert isinstance(spec, WorkerSpec), f"{name} is no worker"
        successor = self._state.add_worker(spec.role, name, reserves=reserves)
        self._doing(f"{successor} takes the place of {name}")

    def _out(self, name: str, version: int | None) -> None:
        work = self._supervisor.take_out(name, version, self._plan.drain_s)
        self._supervisor.set_off(work)

    def _doing(self, what: str) -> None:
        self._supervisor.doing = what

    async def _take_back(self) -> None:
        """Take back what does not serve; the old ones go on."""
        plan, state = self._plan, self._state
        is_old_there = any(name in state.members for name in plan.routers)
        handed_over = plan.is_new_lineage and not is_old_there
        if handed_over:
            return  # There is nobody left to go back to; what does not come up is tried again.
        for member in new_members(plan, state.members):
            await self._give_up(member.spec)
        if plan.is_new_lineage:
            await self._leave_lineage(plan.revision)
        self._use_former()

    async def _give_up(self, spec: MemberSpec) -> None:
        former = None
        if spec.name in self._plan.workers:
            assert isinstance(spec, WorkerSpec), f"{spec.name} is no worker"
            number = int(spec.name.rpartition("-")[2])
            group = group_of(
                self._supervisor.configs.of(self._plan.former_revision).workers, spec.role
            )
            former = dataclasses.replace(
                worker_spec(spec.role, number, group),
                revision=self._plan.former_revision,
                lineage=self._plan.former_lineage,
            )
        await self._supervisor.end(self._state.give_up(spec.name, former))
        self._state.return_renewed(spec.name)

    async def _leave_lineage(self, lineage: int) -> None:
        """Nobody asks workers of a lineage whose routers never served."""
        for member in tuple(self._state.members.values()):
            if member.spec.lineage == lineage:
                await self._give_up(member.spec)

    def _use_former(self) -> None:
        configs = self._supervisor.configs
        configs.go_back(self._plan.former_revision)
        config = configs.current
        settings = Settings(
            config.workers,
            config.restart_backoff_s,
            self._plan.former_revision,
            self._plan.former_lineage,
        )
        self._state.use(settings)

    async def _end(self, phase: RolloutPhase, reason: str) -> None:
        rollout = self._supervisor.rollout
        assert rollout is not None, "there is one, as long as it is rolled out"
        self._supervisor.rollout = dataclasses.replace(rollout, phase=phase.value, reason=reason)
        _log.info("rollout over", extra={"phase": phase.value, "reason": reason})
        await self._supervisor.announce()
