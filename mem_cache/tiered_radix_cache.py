"""A prefix index over two tiers: each edge has slots on the device, on the host, or both.

Residency is closed towards the root in each tier: an edge is on the device (host) only if the
edge before it is. So what a path has on a tier is a prefix of it, the candidates of a tier are the
unlocked edges that no edge of the tier follows, and the unlocked tokens of a tier are exactly
what can be evicted from it. An edge that is on neither tier leaves the tree.

Block events speak of KV held in any tier: moving between tiers is no event.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mem_cache.eviction import EvictionOrder
from mem_cache.radix_cache import RadixCache
from mem_cache.tree_node import NO_SLOTS, MatchResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvferry.config import EvictionPolicy
    from kvferry.ids import ExtraKey, SlotIndices, TokenIds
    from mem_cache.slot_allocator import SlotAllocator
    from mem_cache.tree_node import TreeNode


class TieredRadixCache(RadixCache):
    """A `RadixCache` whose evicted edges may live on in host slots.

    Takes host slots from `host_slots` and gives them back itself; device slots pass through its
    caller as always. `lock` and `unlock` hold the device's slots, `host_lock` and `host_unlock`
    the host's. Owns nothing but slots: the bytes are moved by whoever calls `fill` and `keep`.
    """

    def __init__(
        self,
        page_size: int,
        block_tokens: int,
        policy: EvictionPolicy,
        host_slots: SlotAllocator,
    ) -> None:
        super().__init__(page_size, block_tokens, policy)
        self.host_slots = host_slots
        self.before_eviction: Callable[[TreeNode], None] = lambda node: None
        """Told of an edge that is about to lose its device slots: the last chance to `keep` it."""
        self._host_order = EvictionOrder(policy, self.is_host_evictable)
        self._host_evictable = 0
        self._host_protected = 0

    # --- search -----------------------------------------------------------------------------

    def match_prefix(self, token_ids: TokenIds, extra_key: ExtraKey) -> MatchResult:
        """Find the longest prefix held in any tier. A write, as in one tier."""
        return self._match(token_ids, extra_key, is_hit=True)

    def match_again(self, token_ids: TokenIds, extra_key: ExtraKey) -> MatchResult:
        """As `match_prefix`, for a request whose hit has been counted."""
        return self._match(token_ids, extra_key, is_hit=False)

    def _match(self, token_ids: TokenIds, extra_key: ExtraKey, *, is_hit: bool) -> MatchResult:
        best = self._descend(self._key_bytes(token_ids), extra_key, is_hit=is_hit)
        self._accessed(best)
        device = self._last_on_device(best)
        return MatchResult(device, self._last_on_host(best), best, device.end)

    def _accessed(self, held: TreeNode) -> None:
        self._order.touched(self._last_on_device(held))
        self._host_order.touched(self._last_on_host(held))

    def _last_on_device(self, node: TreeNode) -> TreeNode:
        while node.parent is not None and not node.on_device:
            node = node.parent
        return node

    def _last_on_host(self, node: TreeNode) -> TreeNode:
        while node.parent is not None and not node.on_host:
            node = node.parent
        return node

    def _device_end(self, held: TreeNode) -> int:
        return self._last_on_device(held).end

    def edges(self, node: TreeNode, start: int) -> Iterator[TreeNode]:
        """The edges of the path to `node` that end beyond `start`, last one first."""
        while node.parent is not None and node.end > start:
            yield node
            node = node.parent

    def edge_ending_at(self, node: TreeNode, end: int) -> TreeNode:
        """The edge of the path to `node` that ends at `end` > 0, a page's end; may split one."""
        edge = next(edge for edge in self.edges(node, 0) if edge.start < end)
        return edge if edge.end == end else self._split(edge, end - edge.start)

    def path_host_indices(self, node: TreeNode, start: int) -> SlotIndices:
        """Host slots of the tokens `[start, node.end)` of a path; an edge begins at `start`."""
        parts = [edge.host_value for edge in self.edges(node, start)]
        return np.concatenate(parts[::-1]) if parts else NO_SLOTS.copy()

    def _split(self, lower: TreeNode, tokens: int) -> TreeNode:
        upper = super()._split(lower, tokens)
        if lower.on_host:
            upper.host_value = lower.host_value[:tokens].copy()
            lower.host_value = lower.host_value[tokens:].copy()
        upper.host_lock_ref = lower.host_lock_ref
        upper.device_children = int(lower.on_device)
        upper.host_children = int(lower.on_host)
        upper.in_flight = lower.in_flight
        return upper

    # --- the device -------------------------------------------------------------------------

    def is_evictable(self, node: TreeNode) -> bool:
        """Whether this edge can leave the device: unlocked, and no edge there follows."""
        return (
            node.lock_ref == 0
            and node.device_children == 0
            and node.parent is not None
            and node.on_device
        )

    def fill(self, node: TreeNode, slots: SlotIndices) -> None:
        """Put an edge on the device: the index owns `slots` from now on."""
        parent = node.parent
        assert parent is not None, f"{node} is not in the tree"
        assert not node.on_device, f"{node} has device slots already"
        assert node.lock_ref == 0, f"{node} is locked without slots"
        assert len(slots) == node.length, f"check 2: {node} is offered {len(slots)} slots"
        node.value = slots
        parent.device_children += 1
        self._evictable += node.length
        if self.is_evictable(node):
            self._order.add(node)

    def _take_over(
        self, held: TreeNode, value: SlotIndices, owned_from: int
    ) -> tuple[int, SlotIndices]:
        """Edges that were only on the host get the caller's slots: nothing is copied."""
        device_end = self._device_end(held)
        assert owned_from <= device_end, f"the index lost what ends at {owned_from}"
        for edge in self.edges(held, device_end):
            self.fill(edge, value[edge.start : edge.end].copy())
        self._host_order.touched(held)
        return device_end, value[owned_from:device_end]

    def _add_leaf(
        self, parent: TreeNode, key: bytes, value: SlotIndices, extra_key: ExtraKey, priority: int
    ) -> TreeNode:
        parent.device_children += 1
        return super()._add_leaf(parent, key, value, extra_key, priority)

    def _evict_leaf(self, node: TreeNode) -> SlotIndices:
        """Take an edge off the device; out of the tree too if the host has no copy."""
        parent = node.parent
        assert parent is not None, f"check 5: {node} is not in the tree"
        assert self.is_evictable(node), f"check 5: {node} is locked, or followed on the device"
        self.before_eviction(node)
        slots, node.value = node.value, NO_SLOTS
        parent.device_children -= 1
        self._evictable -= node.length
        if not node.on_host:
            self._remove(node, parent)
        if self.is_evictable(parent):
            self._order.add(parent)
        return slots

    def _remove(self, node: TreeNode, parent: TreeNode) -> None:
        # Nothing follows it: what is on a tier is closed towards the root, and it is on none.
        assert not node.children, f"{node} is removed with what follows it"
        assert node.in_flight is None, f"{node} is removed while it is copied"
        del parent.children[node.child_key]
        node.parent = None
        self._log.removed(node.block_digests)

    # --- the host ---------------------------------------------------------------------------

    def is_host_evictable(self, node: TreeNode) -> bool:
        """Whether this edge can leave the host: unlocked there, and no edge there follows."""
        return (
            node.host_lock_ref == 0
            and node.host_children == 0
            and node.parent is not None
            and node.on_host
        )

    def can_find_on_host(self, node: TreeNode) -> bool:
        """Whether the host's eviction will come across this edge."""
        return node in self._host_order

    def host_evictable_size(self) -> int:
        """Tokens that eviction could free on the host."""
        return self._host_evictable

    def host_protected_size(self) -> int:
        """Tokens in edges locked on the host."""
        return self._host_protected

    def host_lock(self, node: TreeNode) -> None:
        """Protect the host slots of the path from `node` to the root, all of it on the host."""
        for edge in self.edges(node, 0):
            assert edge.on_host, f"{edge} has no host slots to lock"
            if edge.host_lock_ref == 0:
                self._host_evictable -= edge.length
                self._host_protected += edge.length
            edge.host_lock_ref += 1

    def host_unlock(self, node: TreeNode) -> None:
        """Undo one `host_lock` of the same node."""
        for edge in self.edges(node, 0):
            assert edge.host_lock_ref > 0, f"check 7: {edge} is unlocked on the host once too often"
            edge.host_lock_ref -= 1
            if edge.host_lock_ref == 0:
                self._host_evictable += edge.length
                self._host_protected -= edge.length
                if self.is_host_evictable(edge):
                    self._host_order.add(edge)

    def keep(self, node: TreeNode, host_slots: SlotIndices) -> None:
        """Put an edge on the host: the index owns `host_slots` from now on."""
        parent = node.parent
        assert parent is not None, f"{node} is not in the tree"
        assert not node.on_host, f"{node} has host slots already"
        assert len(host_slots) == node.length, f"check 2: {node} is offered {len(host_slots)} slots"
        node.host_value = host_slots
        parent.host_children += 1
        self._host_evictable += node.length
        if self.is_host_evictable(node):
            self._host_order.add(node)

    def add_host_leaf(
        self,
        parent: TreeNode,
        key: bytes,
        host_slots: SlotIndices,
        extra_key: ExtraKey,
        priority: int,
    ) -> None:
        """A new edge, on the host only, for what `key` has beyond `parent`."""
        leaf = self._attach(parent, key, NO_SLOTS, extra_key, priority)
        self.keep(leaf, host_slots)
        self._log.stored(leaf.block_digests)

    def host_room(self) -> int:
        """Host slots that are free or can be evicted."""
        return self.host_slots.num_free + self._host_evictable

    def take_host_slots(self, num_slots: int) -> SlotIndices | None:
        """Fresh host slots, whole pages, evicting if need be; None, with nothing changed."""
        if num_slots > self.host_room():
            return None
        while self.host_slots.num_free < num_slots:
            node = self._host_order.pop()
            assert node is not None, "the host promised more than it could evict"
            self._evict_from_host(node)
        return self.host_slots.alloc(num_slots)

    def _evict_from_host(self, node: TreeNode) -> None:
        parent = node.parent
        assert parent is not None, f"check 5: {node} is not in the tree"
        host_slots, node.host_value = node.host_value, NO_SLOTS
        self.host_slots.free(host_slots)
        parent.host_children -= 1
        self._host_evictable -= node.length
        if not node.on_device:
            self._remove(node, parent)
        if self.is_host_evictable(parent):
            self._host_order.add(parent)

    def reset(self) -> SlotIndices:
        """Drop everything in both tiers; nothing may be locked. Returns the device's slots."""
        assert self._host_protected == 0, "a locked tree cannot be dropped"
        for node in self.nodes():
            self.host_slots.free(node.host_value)
        self._host_order.clear()
        self._host_evictable = 0
        return super().reset()
