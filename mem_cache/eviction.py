"""In which order unlocked leaves leave the tree."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from mem_cache.tree_node import TreeNode


class EvictionOrder(Protocol):
    """Knows every unlocked leaf and yields the next one to evict, without scanning the tree."""

    def add(self, node: TreeNode) -> None:
        """`node` became an unlocked leaf."""
        ...

    def pop(self) -> TreeNode | None:
        """Take out the unlocked leaf to evict next; None if there is none."""
        ...

    def clear(self) -> None:
        """Forget every node."""
        ...


class LruOrder:
    """Least recently accessed first.

    A heap with one entry per node at most. Entries are not moved when a node is accessed, locked
    or given children: access times only grow, so an outdated entry comes up too early, is seen to
    be outdated, and is put back or dropped. Cost: amortised O(log n) per eviction and per access.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, TreeNode]] = []

    def add(self, node: TreeNode) -> None:
        """`node` became an unlocked leaf."""
        if not node.in_order:
            node.in_order = True
            heapq.heappush(self._heap, (node.last_access, node.node_id, node))

    def pop(self) -> TreeNode | None:
        """Take out the unlocked leaf to evict next; None if there is none."""
        while self._heap:
            accessed, _, node = heapq.heappop(self._heap)
            node.in_order = False
            if not node.is_evictable:
                continue
            if node.last_access == accessed:
                return node
            self.add(node)
        return None

    def clear(self) -> None:
        """Forget every node."""
        for _, _, node in self._heap:
            node.in_order = False
        self._heap.clear()
