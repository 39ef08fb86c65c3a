"""The ledger's checks of a second tier. The numbers are those of `mem_cache.ledger`.

1 each host slot, and each host page, has one owner: free, an edge, or a write in flight
2 an edge has as many host slots as tokens, or none
5 what is on a tier is closed towards the root; the counts of followers are right; every host
  candidate can be found by eviction
7 host locks are those of the copies in flight; locked edges are resident; sizes are the edges'
8 the host's accounts add up to the total
9 with no copy in flight nothing on the host is protected, writing or loading
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from mem_cache.slot_owners import check_owners
from mem_cache.tree_node import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvferry.ids import SlotIndices
    from mem_cache.host_tier import HostTier
    from mem_cache.tree_node import TreeNode


def check_tier(tier: HostTier, nodes: Sequence[TreeNode]) -> Iterator[str]:
    """Every violation of the host tier's rules."""
    yield from _check_host_slots(tier, nodes)
    for node in nodes:
        yield from _check_residency(tier, node)
    yield from _check_copies(tier, nodes)
    yield from _check_host_locks(tier, nodes)
    yield from _check_host_accounts(tier)


def _check_host_slots(tier: HostTier, nodes: Sequence[TreeNode]) -> Iterator[str]:
    owned: list[tuple[str, SlotIndices]] = [("host allocator", tier.tree.host_slots.free_slots())]
    owned += [(f"host part of {node!r}", node.host_value) for node in nodes]
    owned += [(f"write of {t.node!r}", t.host_slots) for t in tier.transfers() if not t.is_load]
    if tier.files is not None:
        owned += tier.files.owned()
    yield from check_owners(owned, tier.pages.page_size, tier.pages.num_slots)


def _check_residency(tier: HostTier, node: TreeNode) -> Iterator[str]:
    tree, parent = tier.tree, node.parent
    if node.on_host and len(node.key) != TOKEN_BYTES * len(node.host_value):
        yield f"check 2: {node} has {len(node.key)} key bytes, {len(node.host_value)} host slots"
    if not node.on_device and not node.on_host:
        yield f"check 5: {node} is on neither tier"
    if parent is not None and parent.parent is not None:
        if node.on_device and not parent.on_device:
            yield f"check 5: {node} is on the device, what goes before it is not"
        if node.on_host and not parent.on_host:
            yield f"check 5: {node} is on the host, what goes before it is not"
    children = node.children.values()
    counts = (sum(c.on_device for c in children), sum(c.on_host for c in children))
    if counts != (node.device_children, node.host_children):
        yield f"check 5: {node} is followed by {counts}, not what it counted"
    if tree.is_host_evictable(node) and not tree.can_find_on_host(node):
        yield f"check 5: {node} is a candidate that the host's eviction cannot find"
    if node.lock_ref and not node.on_device:
        yield f"check 7: {node} is locked without device slots"
    if node.host_lock_ref and not node.on_host:
        yield f"check 7: {node} is locked without host slots"


def _check_copies(tier: HostTier, nodes: Sequence[TreeNode]) -> Iterator[str]:
    """Each copy covers its stretch, edge by edge, and no edge but these is marked."""
    marked = {node.node_id for node in nodes if node.in_flight is not None}
    for transfer in tier.transfers():
        edges = list(tier.tree.edges(transfer.node, transfer.start))
        marked -= {edge.node_id for edge in edges if edge.in_flight is transfer.copy}
        length = sum(edge.length for edge in edges)
        if {len(transfer.slots), len(transfer.host_slots)} != {length}:
            yield f"check 1: the copy of {transfer.node} is not as long as its edges, {length}"
        elif transfer.is_load:
            path = tier.tree.path_host_indices(transfer.node, transfer.start)
            if not np.array_equal(path, transfer.host_slots):
                yield f"check 1: the load of {transfer.node} reads other host slots"
        elif not np.array_equal(
            tier.tree.path_device_indices(transfer.node, transfer.start), transfer.slots
        ):
            yield f"check 1: the write of {transfer.node} reads other slots"
        if transfer.is_load and not transfer.waiters:
            yield f"check 7: nobody waits for the load of {transfer.node}"
    if marked:
        yield f"check 7: edges {sorted(marked)} are marked for copies that do not copy them"


def _check_host_locks(tier: HostTier, nodes: Sequence[TreeNode]) -> Iterator[str]:
    ends = [t.node if t.is_load else t.above for t in tier.transfers()]
    if tier.files is not None:
        ends += tier.files.host_locked()
    expected: Counter[int] = Counter()
    for node in ends:
        if node is not None:
            expected.update(edge.node_id for edge in tier.tree.edges(node, 0))
    for node in nodes:
        if node.host_lock_ref != expected[node.node_id]:
            yield f"check 7: {node} should have host_lock_ref {expected[node.node_id]}"
    protected = sum(len(node.host_value) for node in nodes if node.host_lock_ref > 0)
    evictable = sum(len(node.host_value) for node in nodes if node.host_lock_ref == 0)
    told = (tier.tree.host_protected_size(), tier.tree.host_evictable_size())
    if told != (protected, evictable):
        yield f"check 7: host sizes are told as {told}, edges hold {(protected, evictable)}"


def _check_host_accounts(tier: HostTier) -> Iterator[str]:
    accounts = tier.accounts()
    if not accounts.is_conserved:
        yield f"check 8: host accounts do not add up: {accounts}"
    if tier.copies_in_flight == 0 and not accounts.is_idle:
        yield f"check 9: nothing is copied, but not all is given back on the host: {accounts}"
