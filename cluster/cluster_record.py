"""What a supervisor must know that its members cannot tell it: the durable record of a cluster.

A new supervisor reads who is wanted here, asks every living process what it is, and goes on. The
record is JSON, a few kilobytes, and written whenever it has changed.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from cluster.members import MemberSpec, RouterSpec, WorkerSpec
from cluster.rollout_plan import RolloutPlan, RolloutState
from kvferry.config import config_from_mapping, to_mapping
from kvferry.errors import InternalError
from kvferry.ids import WorkerId
from kvferry.membership import Role

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvferry.config import ClusterConfig

_FORMAT = 1
VERSIONS_PER_START = 2**32
"""Of the membership, which a supervisor has for itself: more changes than one of them lives to see.
Its successor begins above all of them, whatever its predecessor wrote last."""


class RecordUnreadable(InternalError):
    """The record is not one that this version of kvferry has written."""


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """One member that is wanted, or was and has not left yet."""

    spec: MemberSpec
    launch: int
    """Its last one that is known of."""
    role: Role | None = None
    """What routers use it for; None: for what it was made."""
    drain_s: float | None = None
    """It drains, and has been given so long. None: it stays."""
    renewal: MemberSpec | None = None
    """It is started again as this when it has drained. None: it leaves."""
    replaces: str = ""
    """The member whose place it takes, as long as that is there."""


@dataclass(frozen=True, slots=True)
class ClusterRecord:
    """The whole record."""

    starts: int
    """Of supervisors, the one that has written this among them."""
    configs: Mapping[int, ClusterConfig]
    """By revision: the current one, and those that members still run under."""
    revision: int
    """The current one."""
    lineage: int
    """Of members that are made now."""
    members: tuple[MemberRecord, ...]
    next_numbers: Mapping[str, int]
    """By kind of member the number of the next one: no name is used twice."""
    rollout: RolloutState | None = None
    """The last one, under way or over."""

    @property
    def first_version(self) -> int:
        """Below all versions of the membership of whoever reads this as the next supervisor."""
        return self.starts * VERSIONS_PER_START

    def to_json(self) -> str:
        """As it is kept."""
        tree = {
            "format": _FORMAT,
            "starts": self.starts,
            "configs": {str(number): to_mapping(each) for number, each in self.configs.items()},
            "revision": self.revision,
            "lineage": self.lineage,
            "members": [_member_to_tree(each) for each in self.members],
            "next_numbers": dict(self.next_numbers),
            "rollout": None if self.rollout is None else dataclasses.asdict(self.rollout),
        }
        return json.dumps(tree, sort_keys=True)


class RecordStore(Protocol):
    """Keeps the record for as long as the members of the cluster may live."""

    async def load(self) -> str | None:
        """What was saved last; None: nothing was. Raises `WorkerUnavailable` if nobody can tell."""
        ...

    async def save(self, text: str) -> None:
        """Replace it, whole or not at all. Raises `WorkerUnavailable` if it is not sure to be."""
        ...


def record_from_json(text: str) -> ClusterRecord:
    """Raises `RecordUnreadable`."""
    try:
        tree = json.loads(text)
        if tree["format"] != _FORMAT:
            raise RecordUnreadable(f"the cluster's record has format {tree['format']}")
        return ClusterRecord(
            starts=tree["starts"],
            configs={
                int(number): config_from_mapping(each) for number, each in tree["configs"].items()
            },
            revision=tree["revision"],
            lineage=tree["lineage"],
            members=tuple(_member_from_tree(each) for each in tree["members"]),
            next_numbers=tree["next_numbers"],
            rollout=None if tree["rollout"] is None else _rollout_from_tree(tree["rollout"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordUnreadable(f"the cluster's record cannot be read: {error!r}") from error


def _member_to_tree(member: MemberRecord) -> dict[str, Any]:
    return {
        "spec": _spec_to_tree(member.spec),
        "launch": member.launch,
        "role": None if member.role is None else member.role.value,
        "drain_s": member.drain_s,
        "renewal": None if member.renewal is None else _spec_to_tree(member.renewal),
        "replaces": member.replaces,
    }


def _member_from_tree(tree: dict[str, Any]) -> MemberRecord:
    return MemberRecord(
        spec=_spec_from_tree(tree["spec"]),
        launch=tree["launch"],
        role=None if tree["role"] is None else Role(tree["role"]),
        drain_s=tree["drain_s"],
        renewal=None if tree["renewal"] is None else _spec_from_tree(tree["renewal"]),
        replaces=tree["replaces"],
    )


def _spec_to_tree(spec: MemberSpec) -> dict[str, Any]:
    tree = dataclasses.asdict(spec)
    if isinstance(spec, WorkerSpec):
        tree["role"] = spec.role.value
    return tree


def _spec_from_tree(tree: dict[str, Any]) -> MemberSpec:
    if "worker_id" in tree:
        known = tree | {"worker_id": WorkerId(tree["worker_id"]), "role": Role(tree["role"])}
        return WorkerSpec(**known)
    return RouterSpec(**tree)


def _rollout_from_tree(tree: dict[str, Any]) -> RolloutState:
    plan = tree["plan"]
    lists = {name: tuple(plan[name]) for name in ("workers", "routers", "changes")}
    return RolloutState(**(tree | {"plan": RolloutPlan(**(plan | lists))}))
