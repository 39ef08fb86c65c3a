"""The page caches of the replayed workers: least recently used pages leave first, leaves first."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class WorkerCaches:
    """One cache per worker over the nodes of a prompt tree.

    All blocks of a node are used together, and a node is never used without those above it, so
    it is enough to order nodes; a prompt's nodes are ordered root last, so that leaves go first.
    """

    def __init__(self, node_blocks: NDArray[np.int64], workers: int, capacity_blocks: int) -> None:
        self.held = np.zeros((node_blocks.size, workers), dtype=np.int64)
        """Blocks of each node that each worker holds: a leading part of the node."""
        self._node_blocks = node_blocks
        self._orders: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(workers)]
        self._used = [0] * workers
        self._capacity = capacity_blocks

    def hit_blocks(self, path: NDArray[np.int64]) -> NDArray[np.int64]:
        """Leading blocks of a prompt that each worker holds; shape [workers].

        A worker that lacks a part of a node holds nothing below it, so the sum is the prefix.
        """
        return self.held[path].sum(axis=0)

    def store(self, worker: int, path: NDArray[np.int64]) -> list[tuple[int, int]]:
        """Use a prompt: store what is missing, as the most recent. Returns changes (node, blocks).

        Blocks are those gained, or lost where negative.
        """
        wanted = self._node_blocks[path]
        missing = wanted - self.held[path, worker]
        self.held[path, worker] = wanted
        order = self._orders[worker]
        for node in reversed(path.tolist()):
            order[node] = None
            order.move_to_end(node)
        gained = missing.nonzero()[0]
        changes = list(zip(path[gained].tolist(), missing[gained].tolist(), strict=True))
        self._used[worker] += int(missing.sum())
        if self._used[worker] > self._capacity:
            changes += self._evict(worker)
        return changes

    def _evict(self, worker: int) -> list[tuple[int, int]]:
        changes = []
        order = self._orders[worker]
        while (excess := self._used[worker] - self._capacity) > 0:
            node = next(iter(order))
            held = int(self.held[node, worker])
            lost = min(held, excess)
            self.held[node, worker] = held - lost
            self._used[worker] -= lost
            changes.append((node, -lost))
            if lost == held:
                del order[node]
        return changes
