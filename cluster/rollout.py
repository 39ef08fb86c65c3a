"""The next step of a rollout: a pure function of its plan and of what there is.

One member at a time, and nobody goes before somebody has taken its place:

    same lineage:  for each worker: a new one comes up, the old one drains and leaves; where there
                   is no room for both, the old one drains and comes back as a new one
    new lineage:   new workers come up wherever there is room, at least one that decodes; new
                   routers, which are told of new workers alone, take over the ports of the old
                   ones; these end when their requests have; then old workers leave or come back

It holds no state of its own, so that whoever takes over goes on with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from cluster.member_state import Phase
from cluster.members import RouterSpec, WorkerSpec
from kvferry.membership import Role

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cluster.member_state import Member
    from cluster.rollout_plan import RolloutPlan

START_FAILURES_MAX = 2
"""Launches of a new member that end before it serves; after so many it will not come up."""


@dataclass(frozen=True, slots=True)
class Replace:
    """Start a worker that takes this one's place, if there is room for both; else, unless
    `only_beside`, have this one drain and come back."""

    name: str
    only_beside: bool


@dataclass(frozen=True, slots=True)
class Drain:
    """Take this worker out: another one has its place."""

    name: str


@dataclass(frozen=True, slots=True)
class Succeed:
    """Start a router that takes over this one's ports."""

    name: str


@dataclass(frozen=True, slots=True)
class Retire:
    """Take this router out: another one has its ports."""

    name: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Something is under way; until when, only a report can tell."""

    what: str


@dataclass(frozen=True, slots=True)
class Done:
    """Everybody is as planned."""


@dataclass(frozen=True, slots=True)
class Fail:
    """A new member does not come up."""

    name: str
    reason: str


Step: TypeAlias = Replace | Drain | Succeed | Retire | Wait | Done | Fail


def next_step(
    plan: RolloutPlan,
    members: Mapping[str, Member],
    told: frozenset[str],
    postponed: frozenset[str],
) -> Step:
    """What to do now. `told`: routers that know the current membership. `postponed`: workers beside
    which there was no room for another one."""
    successors = {each.replaces: each for each in members.values() if each.replaces}
    failed = _failed(plan, members)
    if failed is not None:
        return failed
    olds = [members[name] for name in plan.workers if _is_old(plan, members.get(name))]
    routers = [members[name] for name in plan.routers if name in members]
    if plan.is_new_lineage and routers:
        step = _prepare(plan, olds, members, successors, postponed)
        return _hand_over(routers, successors, told) if step is None else step
    if (step := _replace_each(plan, olds, members, successors)) is not None:
        return step
    if routers:
        return _hand_over(routers, successors, told)
    return Done()


def progress(plan: RolloutPlan, members: Mapping[str, Member]) -> tuple[int, int]:
    """How many are as planned, of how many."""
    names = plan.workers + plan.routers
    left = sum(
        name in plan.routers or _is_old(plan, members[name]) for name in names if name in members
    )
    return len(names) - left, len(names)


def new_members(plan: RolloutPlan, members: Mapping[str, Member]) -> list[Member]:
    """Those that this rollout has made and that do not serve yet."""
    return [
        member
        for name, member in members.items()
        if member.spec.revision == plan.revision
        and (member.replaces or name in plan.workers)
        and not member.has_run
    ]


def _failed(plan: RolloutPlan, members: Mapping[str, Member]) -> Fail | None:
    for member in new_members(plan, members):
        if member.failed_for_good or member.failures >= START_FAILURES_MAX:
            return Fail(member.spec.name, member.last_end)
    return None


def _is_old(plan: RolloutPlan, member: Member | None) -> bool:
    return member is not None and member.spec.revision < plan.revision


def _replace_each(
    plan: RolloutPlan,
    olds: list[Member],
    members: Mapping[str, Member],
    successors: Mapping[str, Member],
) -> Step | None:
    for name in plan.workers:
        member = members.get(name)
        if member is not None and not _is_old(plan, member) and member.phase is not Phase.RUNNING:
            return Wait(f"{name} is being started again")
    for old in olds:
        name = old.spec.name
        if old.is_draining:
            return Wait(f"{name} drains")
        successor = successors.get(name)
        if successor is None:
            return Replace(name, only_beside=False)
        if successor.phase is not Phase.RUNNING:
            return Wait(f"{successor.spec.name} is being started")
        return Drain(name)
    return None


def _prepare(
    plan: RolloutPlan,
    olds: list[Member],
    members: Mapping[str, Member],
    successors: Mapping[str, Member],
    postponed: frozenset[str],
) -> Step | None:
    """Have new workers beside the old ones. None: those that can be there are."""
    fresh = [
        member
        for member in members.values()
        if isinstance(member.spec, WorkerSpec) and not _is_old(plan, member)
    ]
    for member in fresh:
        if member.phase is not Phase.RUNNING:
            return Wait(f"{member.spec.name} is being started")
    for old in olds:
        name = old.spec.name
        if old.is_draining:
            return Wait(f"{name} drains")
        if name not in successors and name not in postponed:
            return Replace(name, only_beside=True)
    if any(_decodes(member) for member in fresh):
        return None
    for old in olds:
        if _decodes(old):
            return Replace(old.spec.name, only_beside=False)
    return None


def _hand_over(
    routers: list[Member], successors: Mapping[str, Member], told: frozenset[str]
) -> Step:
    for router in routers:
        name = router.spec.name
        assert isinstance(router.spec, RouterSpec), f"{name} is no router"
        successor = successors.get(name)
        if router.is_draining:
            return Wait(f"{name} finishes what it has")
        if successor is None:
            return Succeed(name)
        if successor.phase is not Phase.RUNNING or successor.spec.name not in told:
            return Wait(f"{successor.spec.name} is being started")
        return Retire(name)
    return Wait("routers")


def _decodes(member: Member) -> bool:
    assert isinstance(member.spec, WorkerSpec)
    role = member.spec.role if member.role is None else member.role
    return role is not Role.PREFILL
