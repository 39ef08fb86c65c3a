"""Places of members on the nodes of a Ray cluster: a placement group for each launch.

All that is known of them is read from Ray each time, so that a supervisor that takes over knows as
much as the one before it.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.launcher import MemberEnded
from cluster.members import WorkerSpec
from cluster.placement import (
    NodeRoom,
    Placed,
    bundle_of,
    choose_node,
    choose_router_node,
    nodes_with_room,
)
from kvferry.membership import Role

if TYPE_CHECKING:
    from collections.abc import Collection

    from cluster.members import MemberSpec
    from kvferry.ray_config import PlacementStrategy

_log = logging.getLogger(__name__)

_PREFIX = "kvferry"
_ROUTER = "router"
_NODE_RESOURCE = "node:"
"""Ray gives each node one of its address."""
_PIN = 0.001
"""Of that, so that a thousand members find room on one node."""
_ROUTER_WAITS_MAX = 6
"""By default with 0.5, 1, 2, 4, 8 and 16 s between them."""
_LEFT = ("RESCHEDULING", "REMOVED")
"""States of a group whose node is gone."""


@dataclass(frozen=True, slots=True)
class Place:
    """What one launch of a member has reserved."""

    group: PlacementGroup
    name: str
    """Of the group."""

    @property
    def options(self) -> dict[str, Any]:
        """Of the actor that takes it."""
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=0)
        return {"scheduling_strategy": strategy}

    def is_lost(self) -> bool:
        """Whether the node is gone, so that whoever was to start there never does."""
        table = placement_group_table(self.group)
        return not table or table["state"] in _LEFT

    def release(self) -> None:
        """Give it back. May be called again."""
        remove_placement_group(self.group)


@dataclass(frozen=True, slots=True)
class _Group:
    """One of our placement groups, as Ray tells of it."""

    group: PlacementGroup
    name: str
    member: str
    role: Role | None
    address: str
    """Of the node it is on or pinned to; empty: Ray has not found one yet."""
    launch: int


class RayPlaces:
    """Places of one kvferry cluster. Each call asks Ray and takes some milliseconds."""

    def __init__(self, strategy: PlacementStrategy) -> None:
        self._strategy = strategy
        self._namespace: str = ray.get_runtime_context().namespace
        self._former: dict[str, str] = {}
        """By member the address of its last node."""
        self._waits: Counter[str] = Counter()
        """Launches of each router that were put off."""

    def reserve(self, spec: MemberSpec, launch: int) -> Place:
        """A place for one launch. Returns at once; Ray may be looking for a node still.

        Raises `MemberEnded` to have a router wait, see `_wait_for_node`.
        """
        nodes, groups = _nodes(), _groups(self._namespace)
        placed = [Placed(each.member, each.address, each.role) for each in groups if each.address]
        former = self._former.get(spec.name, "")
        if isinstance(spec, WorkerSpec):
            node = choose_node(nodes, spec, placed, self._strategy, former)
            bundle, role = bundle_of(spec), spec.role.value
        else:
            fitting = nodes_with_room(nodes, spec.resources)
            node = choose_router_node(fitting, spec.name, placed, former)
            self._wait_for_node(spec.name, node, placed)
            bundle, role = dict(spec.resources), _ROUTER
        if node is not None:
            self._former[spec.name] = node.address
            bundle[f"{_NODE_RESOURCE}{node.address}"] = _PIN
        selector = dict(spec.labels) if isinstance(spec, WorkerSpec) else {}
        name = "/".join((_PREFIX, self._namespace, role, spec.name, str(launch)))
        where = "wherever Ray finds room" if node is None else node.address
        _log.info("placing a member", extra={"member": spec.name, "node": where})
        group = placement_group(
            [bundle or {"CPU": _PIN}],
            strategy="STRICT_PACK",
            name=name,
            lifetime="detached",
            **({"bundle_label_selector": [selector]} if selector else {}),
        )
        return Place(group, name)

    def _wait_for_node(self, name: str, node: NodeRoom | None, placed: list[Placed]) -> None:
        """A router whose node is gone does not go elsewhere at once: clients would not find it when
        its node is back, which takes seconds where it is a restart. The only one does.
        """
        former = self._former.get(name)
        if node is None or former is None or node.address == former:
            return
        has_others = any(each.role is None and each.name != name for each in placed)
        if has_others and self._waits[name] < _ROUTER_WAITS_MAX:
            self._waits[name] += 1
            raise MemberEnded(f"waits for its node {former}: others route meanwhile")
        self._waits[name] = 0

    def find(self, member: str, launch: int) -> Place | None:
        """What a launch of an earlier supervisor has reserved."""
        for each in _groups(self._namespace):
            if (each.member, each.launch) == (member, launch):
                self._former[member] = each.address
                return Place(each.group, each.name)
        return None

    def release_dead(self, living: Collection[tuple[str, int]]) -> None:
        """Give back what launches have reserved that an earlier supervisor saw last, and that are
        not among the living. Where they were is where their members were last."""
        for each in _groups(self._namespace):
            if (each.member, each.launch) not in living:
                self._former[each.member] = each.address
                remove_placement_group(each.group)


def release_all(namespace: str) -> None:
    """Give back every place of a kvferry cluster."""
    for each in _groups(namespace):
        remove_placement_group(each.group)


def _nodes() -> list[NodeRoom]:
    # Ray has no public name for it: of each live node what nobody has reserved.
    state: Any = ray._private.state
    free = state.available_resources_per_node()
    return [
        NodeRoom(
            node["NodeID"],
            node["NodeManagerAddress"],
            free.get(node["NodeID"], {}),
            node.get("Labels") or {},
        )
        for node in _all_nodes()
        if node["Alive"]
    ]


def _all_nodes() -> list[dict[str, Any]]:
    untyped: Any = ray
    nodes: list[dict[str, Any]] = untyped.nodes()
    return nodes


def _groups(namespace: str) -> list[_Group]:
    """Those of this namespace that are not removed."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in _all_nodes()}
    found = []
    for number, table in placement_group_table().items():
        parts = table["name"].split("/")
        if parts[:2] != [_PREFIX, namespace] or table["state"] == "REMOVED":
            continue
        _, _, role, member, launch = parts
        group = PlacementGroup(ray.PlacementGroupID(bytes.fromhex(number)))
        (bundle,) = table["bundles"].values()
        (node,) = table["bundles_to_node_id"].values()
        pins = [each for each in bundle if each.startswith(_NODE_RESOURCE)]
        address = pins[0].removeprefix(_NODE_RESOURCE) if pins else addresses.get(node, "")
        used_as = None if role == _ROUTER else Role(role)
        found.append(_Group(group, table["name"], member, used_as, address, int(launch)))
    return found
