"""In which order unlocked leaves leave a tier of the tree.

| policy | leaves first |
|---|---|
| lru | least recently accessed |
| lfu | fewest hits, then least recently accessed |
| fifo | oldest |
| filo | newest |
| mru | most recently accessed: for cyclic scans larger than the pool |
| priority | lowest priority of any request that published it, then least recently accessed |
| slru | hit at most once, then least recently accessed: one-off prompts do not flush shared ones |

slru: Karedla, Love and Wherry, "Caching strategies to improve disk system performance", 1994.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, TypeAlias

from kvferry.config import EvictionPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mem_cache.tree_node import TreeNode

Rank: TypeAlias = tuple[int, int]
"""What leaves first has the lowest rank."""


_SHARED_HITS = 2
"""Hits from which on `slru` takes a node for shared."""

RANKS: Mapping[EvictionPolicy, Callable[[TreeNode], Rank]] = {
    EvictionPolicy.LRU: lambda node: (0, node.last_access),
    EvictionPolicy.LFU: lambda node: (node.hit_count, node.last_access),
    EvictionPolicy.FIFO: lambda node: (0, node.created_at),
    EvictionPolicy.FILO: lambda node: (0, -node.created_at),
    EvictionPolicy.MRU: lambda node: (0, -node.last_access),
    EvictionPolicy.PRIORITY: lambda node: (node.priority, node.last_access),
    EvictionPolicy.SLRU: lambda node: (int(node.hit_count >= _SHARED_HITS), node.last_access),
}
_FALLING = frozenset({EvictionPolicy.MRU})
"""Policies under which an access lowers the rank."""


class EvictionOrder:
    """Knows every candidate of a tier and yields the next one to evict, without scanning the tree.

    A heap. Where ranks only grow, entries are not moved when a node is accessed, locked or given
    children: an outdated entry comes up too early, is seen to be outdated, and is put back or
    dropped. Where an access lowers the rank, `touched` pushes a second entry and the first one is
    void. Cost: amortised O(log n) per eviction and per access.

    `is_candidate` tells whether a node may be evicted now: an unlocked leaf of the tier.
    """

    def __init__(self, policy: EvictionPolicy, is_candidate: Callable[[TreeNode], bool]) -> None:
        self._rank = RANKS[policy]
        self._falls = policy in _FALLING
        self._is_candidate = is_candidate
        self._heap: list[tuple[Rank, int, int, TreeNode]] = []
        self._queued: dict[int, Rank] = {}
        """Rank of the entry that counts, by node id."""

    def __contains__(self, node: TreeNode) -> bool:
        return node.node_id in self._queued

    def add(self, node: TreeNode) -> None:
        """`node` became a candidate."""
        if node.node_id not in self._queued:
            self._push(node)
        else:
            self.touched(node)

    def touched(self, node: TreeNode) -> None:
        """`node` was accessed."""
        if self._falls and node.node_id in self._queued:
            self._push(node)

    def pop(self) -> TreeNode | None:
        """Take out the candidate to evict next; None if there is none."""
        while self._heap:
            rank, _, node_id, node = heapq.heappop(self._heap)
            if self._queued.get(node_id) != rank:
                continue
            del self._queued[node_id]
            if not self._is_candidate(node):
                continue
            if self._rank(node) == rank:
                return node
            self._push(node)
        return None

    def clear(self) -> None:
        """Forget every node."""
        self._heap.clear()
        self._queued.clear()

    def _push(self, node: TreeNode) -> None:
        rank = self._rank(node)
        if self._queued.get(node.node_id) == rank:
            return
        self._queued[node.node_id] = rank
        # Of equal rank the deepest first: what only leads to it is of no use without it.
        heapq.heappush(self._heap, (rank, -node.end, node.node_id, node))
        if len(self._heap) > 2 * len(self._queued) + 64:
            self._drop_void()

    def _drop_void(self) -> None:
        """Amortised: at least half of the entries are void when it is called."""
        self._heap = [entry for entry in self._heap if self._queued.get(entry[2]) == entry[0]]
        heapq.heapify(self._heap)
