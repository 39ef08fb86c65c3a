"""Which prefixes were sent to which worker lately: what no event can tell of yet.

A tree of the prompts sent, whose edges are runs of prefixes. Every node has, for each worker, the
time when its last prefix was sent there last, so one walk along a prompt answers for all workers
together. A prompt enters with all its prefixes, so no node was sent to a worker later than the
node above it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from router.compiled import compiled

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from router.policies.pool import Prompt

_NEVER = float("-inf")
_NOBODY = 0
"""The column of workers that were sent nothing."""
_WIDTH_MIN = 8
_WIDTH_MAX = 4096
"""Columns. Once as many workers came and went, all is forgotten."""
_NODE_BYTES = 600
"""Of a node without the elements of its arrays."""
_NO_WORKERS: tuple[NDArray[np.uint64], NDArray[np.intp]] = (
    np.empty(0, dtype=np.uint64),
    np.empty(0, dtype=np.intp),
)


class _Node:
    """The prefixes of one edge."""

    __slots__ = ("children", "keys", "last", "parent", "sent_at")

    def __init__(
        self, parent: _Node | None, keys: NDArray[np.uint64], sent_at: NDArray[np.float64]
    ) -> None:
        self.parent = parent
        self.keys = keys
        self.sent_at = sent_at
        """[columns]: when all of the edge was sent to each worker last."""
        self.last = _NEVER
        """When it was sent to anybody last."""
        self.children: dict[int, _Node] = {}
        """By the first key of their edges."""

    @property
    def nbytes(self) -> int:
        """Memory, about."""
        return _NODE_BYTES + self.keys.nbytes + self.sent_at.nbytes


class PendingPrompts:
    """The prompts of the last `memory_s` seconds."""

    def __init__(self, memory_s: float, nbytes_max: int) -> None:
        """Those sent least recently are forgotten sooner where all would take more memory. A
        single prompt may exceed the bound for as long as it is the last one."""
        self._memory_s = memory_s
        self._nbytes_max = nbytes_max
        self._by_age: OrderedDict[_Node, None] = OrderedDict()
        """All nodes, those sent least recently first."""
        self._asked = _NO_WORKERS
        """Workers and their columns. Mostly the same array asks again; nobody writes to it."""
        self._clear()

    @property
    def nbytes(self) -> int:
        """Memory, about."""
        return self._nbytes

    def add(self, worker: int, prompt: Prompt, now: float) -> None:
        """A prompt was sent; `now` never goes back."""
        # At most two nodes come: what is new, and what is left of an edge that it leaves.
        two = 2 * (_NODE_BYTES + 8 * self._width)
        self._forget_older(now - self._memory_s, two + prompt.keys.nbytes)
        column = self._column_of.get(worker)
        if column is None:
            column = self._enter(worker)
        keys, node, at = prompt.keys, self._root, 0
        path: list[_Node] = []
        while at < keys.size:
            child = node.children.get(int(keys[at]))
            if child is None:
                child = self._hang(node, keys[at:].copy(), np.full(self._width, _NEVER))
            shared = _shared(child.keys, keys[at:])
            if shared < child.keys.size:
                self._split(child, shared)
            child.sent_at[column] = child.last = now
            path.append(child)
            node, at = child, at + shared
        # A node goes before the one above it.
        for node in reversed(path):
            self._by_age.move_to_end(node)

    def tokens(
        self, workers: NDArray[np.uint64], prompt: Prompt, since: NDArray[np.float64]
    ) -> NDArray[np.int64]:
        """Leading tokens of `prompt` that each worker was sent at or after its `since`, which is
        no longer ago than `memory_s`."""
        sent_at, tokens = self._path(prompt)
        if not sent_at:
            return np.zeros(workers.size, dtype=np.int64)
        return _sent(np.array(sent_at), np.array(tokens), self._columns(workers), since)

    def _path(self, prompt: Prompt) -> tuple[list[NDArray[np.float64]], list[int]]:
        """Of the nodes that share prefixes with `prompt`: when each was sent to whom; and how many
        tokens it shares with none of them, with the first one, and so on."""
        keys, node, at = prompt.keys, self._root, 0
        sent_at: list[NDArray[np.float64]] = []
        tokens = [0]
        while at < keys.size:
            child = node.children.get(int(keys[at]))
            if child is None:
                break
            shared = _shared(child.keys, keys[at:])
            at += shared
            sent_at.append(child.sent_at)
            tokens.append(int(prompt.ends[at - 1]))
            if shared < child.keys.size:
                break
            node = child
        return sent_at, tokens

    def _columns(self, workers: NDArray[np.uint64]) -> NDArray[np.intp]:
        """Of each worker; `_NOBODY` of those that were sent nothing."""
        if self._asked[0] is not workers:
            column_of = self._column_of
            columns = [column_of.get(worker, _NOBODY) for worker in workers.tolist()]
            self._asked = workers, np.array(columns, dtype=np.intp)
        return self._asked[1]

    def _enter(self, worker: int) -> int:
        """A column for another worker."""
        if len(self._column_of) + 1 >= _WIDTH_MAX:
            self._clear()
        self._asked = _NO_WORKERS
        column = self._column_of[worker] = 1 + len(self._column_of)
        if column == self._width:
            unused = np.full(self._width, _NEVER)
            self._width *= 2
            for node in self._by_age:
                node.sent_at = np.concatenate((node.sent_at, unused))
                self._nbytes += unused.nbytes
        return column

    def _hang(self, parent: _Node, keys: NDArray[np.uint64], sent_at: NDArray[np.float64]) -> _Node:
        node = _Node(parent, keys, sent_at)
        parent.children[int(keys[0])] = node
        self._by_age[node] = None
        self._nbytes += node.nbytes
        return node

    def _split(self, node: _Node, shared: int) -> None:
        """End a node after so many of its prefixes; the others become a node below it."""
        children, keys = node.children, node.keys
        node.children = {}
        node.keys = keys[:shared].copy()
        lower = self._hang(node, keys[shared:].copy(), node.sent_at.copy())
        lower.last = node.last
        lower.children = children
        for child in children.values():
            child.parent = lower
        self._nbytes -= lower.keys.nbytes
        # As old as it was; what is below it is as old or older.
        self._by_age.move_to_end(lower)
        self._by_age.move_to_end(node)

    def _forget_older(self, than: float, room: int) -> None:
        while self._by_age:
            oldest = next(iter(self._by_age))
            if oldest.last >= than and self._nbytes + room <= self._nbytes_max:
                return
            del self._by_age[oldest]
            assert oldest.parent is not None, "only the root has none, and it is not in here"
            assert not oldest.children, "what is below a node is older"
            del oldest.parent.children[int(oldest.keys[0])]
            self._nbytes -= oldest.nbytes

    def _clear(self) -> None:
        self._root = _Node(None, np.empty(0, dtype=np.uint64), np.empty(0))
        self._by_age.clear()
        self._nbytes = 0
        self._width = _WIDTH_MIN
        self._column_of: dict[int, int] = {}
        self._asked = _NO_WORKERS


def _shared(edge: NDArray[np.uint64], keys: NDArray[np.uint64]) -> int:
    """How many leading prefixes both have; at least the first one."""
    both = min(edge.size, keys.size)
    # A key names a whole prefix: where the last ones are equal, so are those before.
    if edge[both - 1] == keys[both - 1]:
        return both
    return int((edge[:both] != keys[:both]).argmax())


@compiled("int64[::1](float64[:, ::1], int64[::1], int64[::1], float64[:])")
def _sent(
    times: NDArray[np.float64],
    tokens: NDArray[np.int64],
    columns: NDArray[np.intp],
    since: NDArray[np.float64],
) -> NDArray[np.int64]:
    """What each column was sent of a path: `times` is [nodes, columns], `tokens` [nodes + 1]."""
    found = np.empty(columns.size, dtype=np.int64)
    for worker, column in enumerate(columns):
        nodes = 0
        # Whoever was sent a node was sent all above it.
        while nodes < times.shape[0] and times[nodes, column] >= since[worker]:
            nodes += 1
        found[worker] = tokens[nodes]
    return found
