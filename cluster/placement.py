"""On which node a member is placed. Pure: from what nodes have and who is there, to a choice.

Each launch of a member has a placement group of one bundle, which this choice pins to a node. Where
no node has room for a worker, the group is left to Ray, whose autoscaler sees it wait and may bring
a node. Routers reserve their place and what they are told to; they go where fewest of them are.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.membership import Role
from kvferry.ray_config import PlacementStrategy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cluster.members import WorkerSpec

_SLACK = 1e-6
"""Ray counts resources in ten-thousandths; sums of floats are off by less than this."""


@dataclass(frozen=True, slots=True)
class NodeRoom:
    """One live node of the Ray cluster."""

    node_id: str
    address: str
    """IP address; unique among the nodes."""
    free: Mapping[str, float]
    """Resources that nobody has reserved."""
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Placed:
    """A member that has a place."""

    name: str
    address: str
    """Of its node."""
    role: Role | None
    """None: a router."""


def bundle_of(spec: WorkerSpec) -> dict[str, float]:
    """What a worker reserves, in Ray's names; never empty, which Ray would refuse."""
    wanted = {"CPU": spec.cpus, "GPU": spec.gpus, **spec.resources}
    reserved = {name: amount for name, amount in wanted.items() if amount > 0.0}
    return reserved or {"CPU": 0.001}


def choose_node(
    nodes: Sequence[NodeRoom],
    spec: WorkerSpec,
    placed: Sequence[Placed],
    strategy: PlacementStrategy,
    former: str = "",
) -> NodeRoom | None:
    """The best node with room for a worker, of equals `former`, the address where it was before.

    None if no node has room.
    """
    wanted = bundle_of(spec)
    fitting = [node for node in nodes if _fits(node, wanted, spec.labels)]
    others = [each for each in placed if each.name != spec.name and each.role is not None]
    by_role = Counter((each.address, each.role) for each in others)
    of_all = Counter(each.address for each in others)

    def rank(node: NodeRoom) -> tuple[float, ...]:
        same, every = by_role[node.address, spec.role], of_all[node.address]
        match strategy:
            case PlacementStrategy.SPREAD:
                return (same, every)
            case PlacementStrategy.PACK:
                return (-every,)
            case PlacementStrategy.PAIR:
                return (-_partners(by_role, node.address, spec.role), same, every)

    # Of equals the one with most room left, then by address: the same input, the same choice.
    return min(
        fitting,
        key=lambda node: (
            *rank(node),
            node.address != former,
            -node.free.get("CPU", 0.0),
            node.address,
        ),
        default=None,
    )


def nodes_with_room(
    nodes: Sequence[NodeRoom], resources: Mapping[str, float]
) -> tuple[NodeRoom, ...]:
    """Those that have all of it left."""
    return tuple(node for node in nodes if _fits(node, resources, {}))


def choose_router_node(
    nodes: Sequence[NodeRoom], name: str, placed: Sequence[Placed], former: str = ""
) -> NodeRoom | None:
    """Where clients know the router, if that node lives, else the node with fewest routers, of
    these the one with fewest workers. None without nodes."""
    others = [each for each in placed if each.name != name]
    routers = Counter(each.address for each in others if each.role is None)
    of_all = Counter(each.address for each in others)
    return min(
        nodes,
        key=lambda node: (
            node.address != former,
            routers[node.address],
            of_all[node.address],
            node.address,
        ),
        default=None,
    )


def _fits(node: NodeRoom, wanted: Mapping[str, float], labels: Mapping[str, str]) -> bool:
    has_room = all(node.free.get(name, 0.0) >= amount - _SLACK for name, amount in wanted.items())
    return has_room and all(node.labels.get(name) == value for name, value in labels.items())


def _partners(by_role: Counter[tuple[str, Role | None]], address: str, role: Role) -> int:
    """Workers of the other role on a node that have nobody to pair with yet."""
    other = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}.get(role)
    if other is None:
        return 0
    return max(0, by_role[address, other] - by_role[address, role])
