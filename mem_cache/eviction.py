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

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, TypeAlias

from kvferry.config import EvictionPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mem_cache.tree_node import TreeNode

Rank: TypeAlias = int
"""What leaves first has the lowest rank."""

_SHARED_HITS = 2
"""Hits from which on `slru` takes a node for shared."""

_TICK_BITS = 48
"""A class of nodes (hits, priority) stands above the ticks in a rank. 2^48 operations of an index
are 89 years at 10^5 a second."""

RANKS: Mapping[EvictionPolicy, Callable[[TreeNode], Rank]] = {
    EvictionPolicy.LRU: lambda node: node.last_access,
    EvictionPolicy.LFU: lambda node: (node.hit_count << _TICK_BITS) + node.last_access,
    EvictionPolicy.FIFO: lambda node: node.created_at,
    EvictionPolicy.FILO: lambda node: -node.created_at,
    EvictionPolicy.MRU: lambda node: -node.last_access,
    EvictionPolicy.PRIORITY: lambda node: (node.priority << _TICK_BITS) + node.last_access,
    EvictionPolicy.SLRU: lambda node: (
        ((node.hit_count >= _SHARED_HITS) << _TICK_BITS) + node.last_access
    ),
}
_FALLING = frozenset({EvictionPolicy.MRU})
"""Policies under which an access lowers the rank."""

_BUCKET_BITS = 10
"""A bucket is for the ranks of 1,024 neighbouring ticks: some thousand nodes, which are sorted
within the processor's caches. One heap of a million nodes is ten times slower per node."""

_SortedEntry: TypeAlias = tuple[Rank, int, int, "TreeNode"]
"""Rank, -end, node id. Of equal rank the deepest node goes first: what only leads to it is of no
use without it."""


class EvictionOrder:
    """Knows every candidate of a tier and yields the next one to evict, without scanning the tree.

    A heap of buckets of nodes. A bucket is a plain list until it is the first one, and a heap from
    then on. Where ranks only grow, nodes are not moved when they are accessed, locked or given
    children: an outdated entry comes up too early, is seen to be outdated, and is put right or
    dropped. Where an access lowers the rank, `touched` makes a second entry and the first one is
    void. Cost of an entry: O(1), and O(log) of the size of one bucket and of their number.

    `is_candidate` tells whether a node may be evicted now: an unlocked leaf of the tier.
    """

    def __init__(self, policy: EvictionPolicy, is_candidate: Callable[[TreeNode], bool]) -> None:
        self._rank = RANKS[policy]
        self._falls = policy in _FALLING
        self._is_candidate = is_candidate
        self._queued: dict[int, Rank] = {}
        """Rank of the entry that counts, by node id."""
        self._unsorted: dict[int, list[TreeNode]] = {}
        self._sorted: dict[int, list[_SortedEntry]] = {}
        self._numbers: list[int] = []
        """Heap of all bucket numbers, each a key of either of the two."""
        self._entries = 0

    def __contains__(self, node: TreeNode) -> bool:
        return node.node_id in self._queued

    def __len__(self) -> int:
        """Entries, void ones included: what takes up memory."""
        return self._entries

    def add(self, node: TreeNode) -> None:
        """`node` became a candidate."""
        if self._falls or node.node_id not in self._queued:
            self._push(node)

    def touched(self, node: TreeNode) -> None:
        """`node` was accessed."""
        if self._falls and node.node_id in self._queued:
            self._push(node)

    def pop(self) -> TreeNode | None:
        """Take out the candidate to evict next; None if there is none."""
        while (heap := self._first_bucket()) is not None:
            rank, _, node_id, node = heappop(heap)
            self._entries -= 1
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
        self._queued.clear()
        self._unsorted.clear()
        self._sorted.clear()
        self._numbers.clear()
        self._entries = 0

    def _push(self, node: TreeNode) -> None:
        rank = self._rank(node)
        if self._queued.get(node.node_id) == rank:
            return
        self._queued[node.node_id] = rank
        number = rank >> _BUCKET_BITS
        if number in self._sorted:
            heappush(self._sorted[number], (rank, -node.end, node.node_id, node))
        elif number in self._unsorted:
            self._unsorted[number].append(node)
        else:
            self._unsorted[number] = [node]
            heappush(self._numbers, number)
        self._entries += 1
        if self._falls and self._entries > 2 * len(self._queued) + 64:
            self._drop_void()

    def _first_bucket(self) -> list[_SortedEntry] | None:
        """The first bucket that is not empty, sorted; None if there is none."""
        while self._numbers:
            number = self._numbers[0]
            if number in self._unsorted:
                # Putting outdated entries right may bring forth a bucket before this one.
                self._sort(number)
            elif heap := self._sorted[number]:
                return heap
            else:
                del self._sorted[number]
                heappop(self._numbers)
        return None

    def _sort(self, number: int) -> None:
        nodes = self._unsorted.pop(number)
        self._sorted[number] = []
        self._entries -= len(nodes)
        for node in self._counting(number, nodes):
            del self._queued[node.node_id]
            if self._is_candidate(node):
                self._push(node)

    def _counting(self, number: int, nodes: list[TreeNode]) -> list[TreeNode]:
        """Those of an unsorted bucket whose entry is the one that counts, each once."""
        ranks = self._queued
        return [
            node
            for node in dict.fromkeys(nodes)
            if (rank := ranks.get(node.node_id)) is not None and rank >> _BUCKET_BITS == number
        ]

    def _drop_void(self) -> None:
        """Amortised: about half of the entries are void when it is called."""
        for number, nodes in self._unsorted.items():
            self._unsorted[number] = self._counting(number, nodes)
        for number, entries in self._sorted.items():
            heap = [entry for entry in entries if self._queued.get(entry[2]) == entry[0]]
            heapify(heap)
            self._sorted[number] = heap
        self._entries = sum(map(len, self._unsorted.values()))
        self._entries += sum(map(len, self._sorted.values()))
