"""The prefix index: a compressed tree from token keys to the slots that hold their K/V.

Locks go from a node to the root, so a node is locked whenever any of its descendants is. Hence
all tokens of unlocked nodes are reachable by evicting leaves, and `evictable_size` is exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvferry.config import EvictionPolicy
from kvferry.kv_events import (
    BLOCK_DIGEST_BYTES,
    AllBlocksCleared,
    BlocksStored,
    chain_digests,
    chain_root_digest,
)
from mem_cache.attention_window import AttentionWindow
from mem_cache.block_log import BlockLog
from mem_cache.eviction import EvictionOrder
from mem_cache.tree_node import (
    NO_SLOTS,
    TOKEN_BYTES,
    InsertResult,
    MatchResult,
    TreeNode,
    new_root,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvferry.ids import ExtraKey, SlotIndices, TokenIds
    from kvferry.kv_events import BlockHash, KvEvent
    from mem_cache.tree_node import ChildKey


class RadixCache:
    """Prefix sharing between requests. See `PrefixCache` for the contract of each method.

    `block_tokens` is the size of the blocks that events speak of, a multiple of the page size.
    """

    def __init__(
        self, page_size: int, block_tokens: int, policy: EvictionPolicy = EvictionPolicy.LRU
    ) -> None:
        assert block_tokens % page_size == 0, "event blocks are whole pages"
        self.root = new_root()
        self.page_size = page_size
        self.window = AttentionWindow.of(None, page_size)
        self.block_tokens = block_tokens
        self._unit_bytes = page_size * TOKEN_BYTES
        self._order = EvictionOrder(policy, self.is_evictable)
        self._log = BlockLog()
        self._tick = 0
        self._nodes_made = 0
        self._evictable = 0
        self._protected = 0

    # --- search -----------------------------------------------------------------------------

    def match_prefix(self, token_ids: TokenIds, extra_key: ExtraKey) -> MatchResult:
        """Find the longest cached prefix. A write: may split an edge, refreshes access times."""
        node = self._descend(self._key_bytes(token_ids), extra_key, is_hit=True)
        self._accessed(node)
        return MatchResult(node, node, node, node.end)

    def path_device_indices(self, node: TreeNode, start: int = 0) -> SlotIndices:
        """Slots of the tokens `[start, node.end)` of the path to `node`, int64."""
        parts: list[SlotIndices] = []
        step = node
        while step.end > start and step.parent is not None:
            parts.append(step.value)
            step = step.parent
        if not parts:
            return NO_SLOTS.copy()
        parts.reverse()
        return np.concatenate(parts)[start - step.end :]

    def _key_bytes(self, token_ids: TokenIds) -> bytes:
        whole = len(token_ids) // self.page_size * self.page_size
        return np.asarray(token_ids[:whole], dtype="<i4").tobytes()

    def _child_key(self, node: TreeNode, unit: bytes, extra_key: ExtraKey) -> ChildKey:
        return extra_key.encode() + unit if node is self.root else unit

    def _descend(
        self, key: bytes, extra_key: ExtraKey, *, is_hit: bool, priority: int = 0
    ) -> TreeNode:
        """The node where the held part of `key` ends, after splitting an edge if need be."""
        self._tick += 1
        tick, unit_bytes = self._tick, self._unit_bytes
        node, offset = self.root, 0
        child_key = self._child_key(node, key[:unit_bytes], extra_key)
        while offset < len(key):
            child = node.children.get(child_key)
            if child is None:
                break
            if not key.startswith(child.key, offset):
                child = self._split(child, self._common_tokens(child.key, key, offset))
            child.last_access = tick
            child.hit_count += is_hit
            if priority > child.priority:
                child.priority = priority
            node = child
            offset += len(child.key)
            child_key = key[offset : offset + unit_bytes]
        return node

    def _common_tokens(self, edge: bytes, key: bytes, offset: int) -> int:
        """Length in whole pages of what `edge` and `key[offset:]` begin with; one page at least."""
        count = min(len(edge), len(key) - offset) // TOKEN_BYTES
        ours = np.frombuffer(edge, dtype="<i4", count=count)
        theirs = np.frombuffer(key, dtype="<i4", count=count, offset=offset)
        differs = ours != theirs
        first = int(differs.argmax())
        common = first if differs[first] else count
        return common // self.page_size * self.page_size

    def _split(self, lower: TreeNode, tokens: int) -> TreeNode:
        """Cut the edge after `tokens`; returns the new upper node, which is as locked as before."""
        parent = lower.parent
        assert parent is not None, "the root has no edge to split"
        assert 0 < tokens < lower.length, f"cannot split {lower} after {tokens} tokens"
        cut = tokens * TOKEN_BYTES
        # Copies, not views: a view would keep the whole edge's memory while half of it is evicted.
        upper = self._new_node(parent, lower.key[:cut], lower.value[:tokens].copy())
        upper.extra_key = lower.extra_key
        upper.child_key = lower.child_key
        upper.lock_ref = lower.lock_ref
        upper.hit_count = lower.hit_count
        upper.priority = lower.priority
        upper.created_at = lower.created_at
        blocks = upper.end // self.block_tokens - parent.end // self.block_tokens
        told = blocks * BLOCK_DIGEST_BYTES
        upper.block_digests = lower.block_digests[:told]
        parent.children[upper.child_key] = upper
        lower.block_digests = lower.block_digests[told:]
        lower.key = lower.key[cut:]
        lower.length -= tokens
        lower.value = lower.value[tokens:].copy()
        lower.parent = upper
        lower.child_key = lower.key[: self._unit_bytes]
        upper.children[lower.child_key] = lower
        return upper

    def _new_node(self, parent: TreeNode, key: bytes, value: SlotIndices) -> TreeNode:
        self._nodes_made += 1
        return TreeNode(self._nodes_made, parent, key, value, self._tick)

    def is_evictable(self, node: TreeNode) -> bool:
        """Whether this is an unlocked leaf that is still in the tree."""
        return node.lock_ref == 0 and not node.children and node.parent is not None

    # --- locks ------------------------------------------------------------------------------

    def lock(self, node: TreeNode, start: int = 0) -> None:
        """Protect the edges of the path to `node` that end beyond `start`."""
        # `start` is there for indexes that give it a meaning; here it is 0, or an edge's end.
        while node.parent is not None and node.end > start:
            if node.lock_ref == 0:
                self._evictable -= node.length
                self._protected += node.length
            node.lock_ref += 1
            node = node.parent

    def unlock(self, node: TreeNode, start: int = 0) -> None:
        """Undo one `lock` of the same node and start."""
        while node.parent is not None and node.end > start:
            assert node.lock_ref > 0, f"check 7: {node} is unlocked more often than locked"
            node.lock_ref -= 1
            if node.lock_ref == 0:
                self._evictable += node.length
                self._protected -= node.length
                if self.is_evictable(node):
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
        """Offer slots: `value[owned_from:]`, whole pages of them; what is before is the index's."""
        assert len(token_ids) == len(value), (
            f"check 2: {len(token_ids)} tokens with {len(value)} slots"
        )
        key = self._key_bytes(token_ids)
        held = self._descend(key, extra_key, is_hit=False, priority=priority)
        if keeps_own and self._device_end(held) > owned_from:
            self._accessed(held)
            return InsertResult.nothing(self.root)
        matched, duplicates = self._take_over(held, value, owned_from)
        if held.end == len(key) // TOKEN_BYTES:
            self._accessed(held)
            return InsertResult(matched, held, duplicates)
        return InsertResult(
            matched, self._add_leaf(held, key, value, extra_key, priority), duplicates
        )

    def _device_end(self, held: TreeNode) -> int:
        """Leading tokens of the path to `held` that have device slots."""
        return held.end

    def _accessed(self, held: TreeNode) -> None:
        """The order of eviction is told of an access to the path that ends in `held`."""
        self._order.touched(held)

    def _take_over(
        self, held: TreeNode, value: SlotIndices, owned_from: int
    ) -> tuple[int, SlotIndices]:
        """Settle the tokens `[owned_from, held.end)`, for which the tree has nodes already.

        Returns how many leading tokens had slots in the tree, and the caller's duplicates.
        """
        return held.end, value[owned_from : held.end]

    def _add_leaf(
        self, parent: TreeNode, key: bytes, value: SlotIndices, extra_key: ExtraKey, priority: int
    ) -> TreeNode:
        """A new leaf, with slots, for what `key` has beyond `parent`."""
        stop = len(key) // TOKEN_BYTES
        leaf = self._attach(parent, key, value[parent.end : stop].copy(), extra_key, priority)
        self._evictable += leaf.length
        self._order.add(leaf)
        self._log.stored(leaf.block_digests)
        return leaf

    def _attach(
        self, parent: TreeNode, key: bytes, value: SlotIndices, extra_key: ExtraKey, priority: int
    ) -> TreeNode:
        """Hang a node for what `key` has beyond `parent` below it."""
        node = self._new_node(parent, key[parent.end * TOKEN_BYTES :], value)
        node.extra_key = extra_key
        node.priority = priority
        node.child_key = self._child_key(parent, node.key[: self._unit_bytes], extra_key)
        parent.children[node.child_key] = node
        node.block_digests = self._hash_blocks(node, key)
        return node

    def _hash_blocks(self, leaf: TreeNode, key: bytes) -> bytes:
        """Digests of the blocks that end within the new node; `key` is its whole path."""
        first = leaf.start // self.block_tokens
        if leaf.end // self.block_tokens == first:
            return b""
        previous = b""
        node = leaf.parent
        while node is not None and not previous:
            previous = node.block_digests[-BLOCK_DIGEST_BYTES:]
            node = node.parent
        return chain_digests(
            previous or chain_root_digest(leaf.extra_key),
            key[first * self.block_tokens * TOKEN_BYTES :],
            self.block_tokens,
        )

    def evict(self, num_tokens: int) -> SlotIndices:
        """Remove unlocked leaves until `num_tokens` slots came free; returns all that did."""
        freed: list[SlotIndices] = []
        count = 0
        while count < num_tokens:
            node = self._order.pop()
            if node is None:
                break
            slots = self._evict_leaf(node)
            freed.append(slots)
            count += len(slots)
        return np.concatenate(freed) if freed else NO_SLOTS.copy()

    def _evict_leaf(self, node: TreeNode) -> SlotIndices:
        """Take an unlocked leaf out of the tree; returns its slots, which came free."""
        parent = node.parent
        assert parent is not None, f"check 5: {node} is not in the tree"
        assert self.is_evictable(node), f"check 5: {node} is no unlocked leaf"
        del parent.children[node.child_key]
        node.parent = None
        self._evictable -= node.length
        self._log.removed(node.block_digests)
        if self.is_evictable(parent):
            self._order.add(parent)
        return node.value

    def reset(self) -> SlotIndices:
        """Drop everything; nothing may be locked. Returns the slots that came free."""
        assert self._protected == 0, "a locked tree cannot be dropped"
        values = [node.value for node in self.nodes()]
        self.root = new_root()
        self._order.clear()
        self._evictable = 0
        self._log.cleared()
        return np.concatenate(values) if values else NO_SLOTS.copy()

    # --- what it holds ----------------------------------------------------------------------

    def can_find(self, node: TreeNode) -> bool:
        """Whether eviction will come across this node."""
        return node in self._order

    def evictable_size(self) -> int:
        """Tokens that eviction could free."""
        return self._evictable

    def protected_size(self) -> int:
        """Tokens in locked nodes."""
        return self._protected

    def nodes(self) -> Iterator[TreeNode]:
        """Every node but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def take_events(self) -> list[KvEvent]:
        """What changed since the last call, in order."""
        events = self._log.take()
        if events is None:
            return [AllBlocksCleared(), BlocksStored(self.snapshot_blocks())]
        return events

    def snapshot_blocks(self) -> tuple[BlockHash, ...]:
        """Hashes of all blocks held, parents first."""
        return tuple(block for node in self.nodes() for block in node.block_hashes)

    def digests_to_come(self, token_ids: TokenIds, extra_key: ExtraKey) -> bytes:
        """Digests of all full blocks of a prompt, unless all are held. Hashes only the others."""
        key = self._key_bytes(token_ids)
        block_bytes = self.block_tokens * TOKEN_BYTES
        held = self._held_digests(key, extra_key)
        first = len(held) // BLOCK_DIGEST_BYTES
        if first == len(key) // block_bytes:
            return b""
        previous = held[-BLOCK_DIGEST_BYTES:] or chain_root_digest(extra_key)
        return held + chain_digests(previous, key[first * block_bytes :], self.block_tokens)

    def _held_digests(self, key: bytes, extra_key: ExtraKey) -> bytes:
        """Digests of the leading blocks of `key` that are held."""
        node, offset, unit_bytes = self.root, 0, self._unit_bytes
        found: list[bytes] = []
        while offset < len(key):
            unit = key[offset : offset + unit_bytes]
            child = node.children.get(self._child_key(node, unit, extra_key))
            if child is None or not (child.on_device or child.on_host):
                break
            if not key.startswith(child.key, offset):
                start = offset // TOKEN_BYTES
                end = start + self._common_tokens(child.key, key, offset)
                blocks = end // self.block_tokens - start // self.block_tokens
                found.append(child.block_digests[: blocks * BLOCK_DIGEST_BYTES])
                break
            found.append(child.block_digests)
            node, offset = child, offset + len(child.key)
        return b"".join(found)
