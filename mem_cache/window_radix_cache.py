"""The prefix index of a model all of whose layers attend to the last tokens only.

A match of m tokens is *usable* if the tree has slots for every position that the tokens after it
still read, `[window.needed_from(m), m)`; what is further left is not needed. So, unlike in a
`RadixCache`, an inner node can be evicted before its descendants: it becomes a *tombstone*, which
keeps its key, because paths lead through it, and has no slots.

| node | device slots | children | lock_ref |
|---|---|---|---|
| live | yes | any | any |
| tombstone | no | at least one | 0 |

Locks protect `[start, node.end)` of a path: edges are cut at `start`, hence a lock covers whole
edges, and cutting one of them leaves both halves as locked as it was. Accesses count for the
window alone, so what only leads to it grows old. Of nodes of equal rank the deepest is evicted
first: with a window longer than every key, that is what a `RadixCache` does, except for the
policies fifo and mru, which rank a node before its descendants.

Events: a block is stored while the node in which it ends has slots. A router never counts on a
tombstone; it may count on fewer tokens than would match.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvferry.config import EvictionPolicy
from mem_cache.radix_cache import RadixCache
from mem_cache.tree_node import NO_SLOTS, TOKEN_BYTES, InsertResult, MatchResult

if TYPE_CHECKING:
    from kvferry.ids import ExtraKey, SlotIndices, TokenIds
    from kvferry.kv_events import BlockHash
    from mem_cache.attention_window import AttentionWindow
    from mem_cache.tree_node import TreeNode


class WindowRadixCache(RadixCache):
    """Prefix sharing within a sliding window. See `PrefixCache` for the contract of each method.

    `match_prefix` finds the longest usable match. `insert` takes slots for `value[owned_from:]`
    only: where nobody has slots for what is before, it makes tombstones. Slots fill tombstones
    and duplicates may lie anywhere, so `matched_len` is `owned_from` and the duplicates' number.
    """

    def __init__(
        self,
        page_size: int,
        block_tokens: int,
        window: AttentionWindow,
        policy: EvictionPolicy = EvictionPolicy.LRU,
    ) -> None:
        super().__init__(page_size, block_tokens, policy)
        assert window.page_size == page_size, "window and tree differ in page size"
        self.window = window

    # --- search -----------------------------------------------------------------------------

    def match_prefix(self, token_ids: TokenIds, extra_key: ExtraKey) -> MatchResult:
        """Find the longest usable prefix. A write: may split edges, refreshes access times."""
        node = self._deepest_usable(self._path(self._key_bytes(token_ids), extra_key))
        start = self.window.needed_from(node.end)
        self._cut(node, start)
        self._touch(node, start, is_hit=True)
        return MatchResult(node, node, node, node.end)

    def _path(self, key: bytes, extra_key: ExtraKey) -> list[TreeNode]:
        """The nodes of the held part of `key`, from the root's child on, after splitting the last
        edge if need be.
        """
        self._tick += 1
        node, offset = self.root, 0
        path: list[TreeNode] = []
        while offset < len(key):
            unit = key[offset : offset + self._unit_bytes]
            child = node.children.get(self._child_key(node, unit, extra_key))
            if child is None:
                break
            if not key.startswith(child.key, offset):
                child = self._split(child, self._common_tokens(child.key, key, offset))
            path.append(child)
            node = child
            offset += len(child.key)
        return path

    def _deepest_usable(self, path: list[TreeNode]) -> TreeNode:
        """The last node of `path` at whose end a match is usable.

        No need to look inside the edges: their ends read the least of what is before them.
        """
        best, live_from = self.root, 0
        for node in path:
            if not node.on_device:
                live_from = node.end
            elif self.window.needed_from(node.end) >= live_from:
                best = node
        return best

    def _cut(self, node: TreeNode, start: int) -> None:
        """Make an edge of the path to `node` begin at `start`."""
        while node.parent is not None and node.start > start:
            node = node.parent
        if node.start < start < node.end:
            self._split(node, start - node.start)

    def _split(self, lower: TreeNode, tokens: int) -> TreeNode:
        """As in a `RadixCache`; the upper half can be evicted like the lower one."""
        upper = super()._split(lower, tokens)
        upper.last_access = lower.last_access
        if self.is_evictable(upper):
            self._order.add(upper)
        return upper

    def _touch(
        self, node: TreeNode, start: int, *, is_hit: bool = False, priority: int = 0
    ) -> None:
        """Note an access to every edge of the path to `node` that ends beyond `start`."""
        while node.parent is not None and node.end > start:
            node.last_access = self._tick
            node.hit_count += is_hit
            node.priority = max(node.priority, priority)
            self._order.touched(node)
            node = node.parent

    def is_evictable(self, node: TreeNode) -> bool:
        """Whether this is an unlocked node with slots that is still in the tree."""
        return node.lock_ref == 0 and node.on_device and node.parent is not None

    # --- locks ------------------------------------------------------------------------------

    def lock(self, node: TreeNode, start: int = 0) -> None:
        """Protect the tokens `[start, node.end)` of the path to `node`; all must have slots."""
        self._cut(node, start)
        while node.parent is not None and node.end > start:
            assert node.on_device, f"check 7: {node} is locked and has no slots"
            if node.lock_ref == 0:
                self._evictable -= node.length
                self._protected += node.length
            node.lock_ref += 1
            node = node.parent

    def unlock(self, node: TreeNode, start: int = 0) -> None:
        """Undo one `lock` of the same node and start."""
        while node.parent is not None and node.end > start:
            assert node.lock_ref > 0, f"check 7: {node} is unlocked more often than locked"
            assert node.start >= start, f"check 7: {node} was not locked from {start} on"
            node.lock_ref -= 1
            if node.lock_ref == 0:
                self._evictable += node.length
                self._protected -= node.length
                self._order.add(node)
            node = node.parent

    # --- contents ---------------------------------------------------------------------------

    def insert(
        self,
        token_ids: TokenIds,
        value: SlotIndices,
        extra_key: ExtraKey,
        *,
        owned_from: int = 0,
        priority: int = 0,
        keeps_own: bool = False,
    ) -> InsertResult:
        """Offer slots: `value[owned_from:]`, whole pages of them; what is before is not read."""
        assert len(token_ids) == len(value), (
            f"check 2: {len(token_ids)} tokens with {len(value)} slots"
        )
        key = self._key_bytes(token_ids)
        length = len(key) // TOKEN_BYTES
        if length <= owned_from:
            return InsertResult.nothing(self.root)
        path = self._path(key, extra_key)
        if keeps_own and any(node.on_device and node.end > owned_from for node in path):
            return InsertResult.nothing(self.root)
        node = path[-1] if path else self.root
        duplicates = self._settle(path, value, owned_from)
        if node.end < owned_from:
            gap = key[: owned_from * TOKEN_BYTES]
            node = self._attach(node, gap, NO_SLOTS, extra_key, priority)
        if node.end < length:
            node = self._add_leaf(node, key, value, extra_key, priority)
        self._touch(node, self.window.needed_from(length), priority=priority)
        return InsertResult(owned_from + len(duplicates), node, duplicates)

    def _settle(self, path: list[TreeNode], value: SlotIndices, owned_from: int) -> SlotIndices:
        """Give offered slots to the tombstones of `path`; returns those that live nodes have."""
        duplicates: list[SlotIndices] = [NO_SLOTS]
        for node in path:
            if node.end <= owned_from:
                continue
            if node.on_device:
                duplicates.append(value[max(node.start, owned_from) : node.end])
                continue
            # Cutting makes `node` the lower half.
            self._cut(node, owned_from)
            node.value = value[node.start : node.end].copy()
            node.created_at = node.last_access = self._tick
            self._evictable += node.length
            self._order.add(node)
            self._log.stored(node.block_digests)
        return np.concatenate(duplicates)

    def _evict_leaf(self, node: TreeNode) -> SlotIndices:
        """Take the slots of an unlocked node, which stays as a tombstone if it has children."""
        assert self.is_evictable(node), f"check 5: {node} is no unlocked node with slots"
        slots, node.value = node.value, NO_SLOTS
        self._evictable -= node.length
        self._log.removed(node.block_digests)
        self._prune(node)
        return slots

    def _prune(self, node: TreeNode) -> None:
        """Remove `node` and the nodes above it as long as they are childless tombstones."""
        while not node.children and not node.on_device and node.parent is not None:
            assert node.lock_ref == 0, f"check 5: {node} is locked and has no slots"
            parent = node.parent
            del parent.children[node.child_key]
            node.parent = None
            node = parent

    # --- what it holds ----------------------------------------------------------------------

    def snapshot_blocks(self) -> tuple[BlockHash, ...]:
        """Hashes of all blocks that end in a node with slots, parents first."""
        return tuple(
            block for node in self.nodes() if node.on_device for block in node.block_hashes
        )
