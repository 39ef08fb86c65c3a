"""Which prefixes were sent to which worker lately: what no event can tell of yet.

A tree of the prompts sent, whose edges are runs of prefixes. Every node has, for each worker, the
time when all of its edge was sent there last, so one walk along a prompt answers for all workers
together. A prompt enters with all its prefixes, so no node was sent to a worker later than the
node above it. A key names a whole prefix, so the first keys of all edges are in one hash table.

There are two trees, in flat arrays to which prompts are only added. When the younger one is as old
as the memory is long, or full, it becomes the older one, and what that held is forgotten.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from router.compiled import compiled, inlined

if TYPE_CHECKING:
    from typing import TypeAlias

    from numpy.typing import NDArray

    from router.policies.pool import Prompt

    _Trees: TypeAlias = tuple[
        NDArray[np.uint64],
        NDArray[np.int64],
        NDArray[np.int64],
        NDArray[np.int64],
        NDArray[np.uint64],
        NDArray[np.int64],
    ]
    """As `_TREES` has them: keys, edges, places, counts, workers, columns."""

_NEVER = float("-inf")
_WIDTH_MIN = 72
"""Columns of times: those of 64 workers, and some that come and go."""
_WIDTH_MAX = 1 << 12
"""Once so many workers were sent something, those of the older tree are forgotten."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_ROOT = 0
"""Of a place: it is free."""
_NOBODY = 0
"""The column of workers that were sent nothing."""
_KEYS, _NODES, _COLUMNS = 0, 1, 2
"""What is in use of a tree; and what it may lack."""
_NOTHING = 3

_TREES = (
    "uint64[:, ::1], "  # keys: [2, keys], of all edges, one after the other
    "int64[:, :, ::1], "  # edges: [2, nodes, 2], from and to where the keys of each are
    "int64[:, ::1], "  # places: [2, twice the nodes or more], nodes by the first key of their edge
    "int64[:, ::1], "  # counts: [2, 3]
    "uint64[:, ::1], "  # workers: [2, twice the columns], by name
    "int64[:, ::1]"  # columns: the same, where each has its times; `_NOBODY`: nobody is here
)


class PendingPrompts:
    """The prompts of the last `memory_s` seconds, and of up to as many before."""

    def __init__(self, memory_s: float, nbytes_max: int) -> None:
        """They are forgotten sooner where they would take more memory, if there are up to 64
        workers. Of a prompt that would take a quarter of it alone, the end is left out."""
        self._memory_s = memory_s
        # Half of the memory is for keys; a node has a row of times, two bounds, and its places.
        keys, nodes = nbytes_max // 2 // 16, nbytes_max // 2 // (16 * (_WIDTH_MIN + 6))
        nodes = max(3, nodes)
        self._trees: _Trees = (
            np.empty((2, max(1, keys)), dtype=np.uint64),
            np.empty((2, nodes, 2), dtype=np.int64),
            np.zeros((2, 1 << (2 * nodes - 1).bit_length()), dtype=np.int64),
            np.array([[0, 1, 1], [0, 1, 1]], dtype=np.int64),
            np.zeros((2, 2 * _WIDTH_MAX), dtype=np.uint64),
            np.zeros((2, 2 * _WIDTH_MAX), dtype=np.int64),
        )
        # Memory is taken only as it is written to.
        self._sent_at = np.empty((2, nodes, _WIDTH_MIN), dtype=np.float64)
        self._young = 0
        self._began = _NEVER
        """The younger tree."""

    @property
    def nbytes(self) -> int:
        """Memory that prompts take, about."""
        keys, nodes, _ = self._trees[3].sum(axis=0).tolist()
        return 8 * (int(keys) + (int(nodes) - 2) * (self._sent_at.shape[2] + 6))

    def add(self, worker: int, prompt: Prompt, now: float) -> None:
        """A prompt was sent; `now` never goes back."""
        age_s = now - self._began
        if age_s >= self._memory_s:
            self._begin_anew(now)
        if age_s >= 2 * self._memory_s:
            self._begin_anew(now)
        keys = prompt.keys[: self._trees[0].shape[1]]
        name = np.uint64(worker)
        while True:
            lacking = _enter(self._trees, self._sent_at, self._young, keys, name, now)
            if lacking == _NOTHING:
                return
            if lacking == _COLUMNS and self._sent_at.shape[2] < _WIDTH_MAX:
                self._widen()
            else:
                self._begin_anew(now)

    def tokens(
        self,
        workers: NDArray[np.uint64],
        prompt: Prompt,
        since: NDArray[np.float64],
        held: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Leading tokens of `prompt` that each worker was sent at or after its `since`, which is
        no longer ago than `memory_s`; or those that are `held` there, if they are more."""
        chain = (prompt.keys, prompt.ends)
        return _tokens(self._trees, self._sent_at, workers, chain, since, held)

    def _widen(self) -> None:
        """Room for twice as many workers."""
        before = self._sent_at
        _, nodes, width = before.shape
        self._sent_at = np.empty((2, nodes, 2 * width), dtype=np.float64)
        for tree, used in enumerate(self._trees[3][:, _NODES].tolist()):
            self._sent_at[tree, :used, :width] = before[tree, :used]
            self._sent_at[tree, :used, width:] = _NEVER

    def _begin_anew(self, now: float) -> None:
        self._young = 1 - self._young
        self._began = now
        _, _, places, counts, _, columns = self._trees
        if counts[self._young, _NODES] > 1:
            places[self._young] = _ROOT
        columns[self._young] = _NOBODY
        counts[self._young] = 0, 1, 1


@inlined
def _mixed(key: np.uint64, size: int) -> np.int64:
    """A place among `size`, a power of two. Keys are hashes where they come from prompts, but
    small numbers in a replay; the upper bits of a product depend on all bits of a key."""
    return np.int64((key * _FACTOR >> np.uint64(32)) & np.uint64(size - 1))


@inlined
def _place(
    places: NDArray[np.int64], edges: NDArray[np.int64], keys: NDArray[np.uint64], key: np.uint64
) -> np.int64:
    """Where the node is whose edge begins with this key, or would be."""
    place = _mixed(key, places.size)
    while places[place] != _ROOT and keys[edges[places[place], 0]] != key:
        place = (place + 1) & (places.size - 1)
    return place


@inlined
def _seat(workers: NDArray[np.uint64], columns: NDArray[np.int64], name: np.uint64) -> np.int64:
    """Where a worker's column is told, or would be."""
    seat = _mixed(name, workers.size)
    while columns[seat] != _NOBODY and workers[seat] != name:
        seat = (seat + 1) & (workers.size - 1)
    return seat


@inlined
def _shared(edge: NDArray[np.uint64], keys: NDArray[np.uint64]) -> int:
    """How many leading prefixes both have."""
    count = 0
    while count < edge.size and count < keys.size and edge[count] == keys[count]:
        count += 1
    return count


@compiled(
    f"int64(Tuple(({_TREES})), float64[:, :, ::1], int64,"
    " Array(uint64, 1, 'C', readonly=True), uint64, float64)"
)
def _enter(
    trees: _Trees,
    sent_at: NDArray[np.float64],
    tree: int,
    prompt: NDArray[np.uint64],
    name: np.uint64,
    now: float,
) -> int:
    """Have a prompt in one of the trees. What it lacks for that, in which case nothing changed."""
    keys, edges, places = trees[0][tree], trees[1][tree], trees[2][tree]
    counts, workers, columns = trees[3][tree], trees[4][tree], trees[5][tree]
    times = sent_at[tree]
    # At most two nodes come: what is new, and what is left of an edge that it leaves.
    if counts[_NODES] + 2 > edges.shape[0] or counts[_KEYS] + prompt.size > keys.size:
        return _NODES
    seat = _seat(workers, columns, name)
    if columns[seat] == _NOBODY:
        if counts[_COLUMNS] == times.shape[1]:
            return _COLUMNS
        workers[seat], columns[seat] = name, counts[_COLUMNS]
        counts[_COLUMNS] += 1
    at = 0
    while at < prompt.size:
        place = _place(places, edges, keys, prompt[at])
        node = places[place]
        if node == _ROOT:
            node = places[place] = counts[_NODES]
            counts[_NODES] += 1
            start = counts[_KEYS]
            counts[_KEYS] += prompt.size - at
            edges[node, 0], edges[node, 1] = start, counts[_KEYS]
            for position in range(at, prompt.size):
                keys[start + position - at] = prompt[position]
            for column in range(times.shape[1]):
                times[node, column] = _NEVER
        start, stop = edges[node, 0], edges[node, 1]
        middle = start + _shared(keys[start:stop], prompt[at:])
        if middle < stop:
            # The end of the edge becomes a node of its own, which was sent when all of it was.
            lower = counts[_NODES]
            counts[_NODES] += 1
            edges[lower, 0], edges[lower, 1] = middle, stop
            for column in range(times.shape[1]):
                times[lower, column] = times[node, column]
            edges[node, 1] = middle
            places[_place(places, edges, keys, keys[middle])] = lower
        times[node, columns[seat]] = now
        at += middle - start
    return _NOTHING


@compiled(
    f"int64[::1](Tuple(({_TREES})), float64[:, :, ::1], uint64[:],"
    " Tuple((Array(uint64, 1, 'C', readonly=True), Array(int64, 1, 'C', readonly=True))),"
    " float64[:], int64[:])"
)
def _tokens(
    trees: _Trees,
    sent_at: NDArray[np.float64],
    names: NDArray[np.uint64],
    chain: tuple[NDArray[np.uint64], NDArray[np.int64]],
    since: NDArray[np.float64],
    held: NDArray[np.int64],
) -> NDArray[np.int64]:
    """The most of what is held and of the leading tokens of a prompt that each worker was sent, in
    either tree."""
    prompt, ends = chain
    found = np.empty(held.size, dtype=np.int64)
    for position in range(held.size):
        found[position] = held[position]
    path = np.empty(prompt.size, dtype=np.int64)
    tokens = np.zeros(prompt.size + 1, dtype=np.int64)
    for tree in range(2):
        keys, edges, places = trees[0][tree], trees[1][tree], trees[2][tree]
        workers, columns, times = trees[4][tree], trees[5][tree], sent_at[tree]
        at = depth = 0
        while at < prompt.size:
            node = places[_place(places, edges, keys, prompt[at])]
            if node == _ROOT:
                break
            start, stop = edges[node, 0], edges[node, 1]
            shared = _shared(keys[start:stop], prompt[at:])
            at += shared
            path[depth] = node
            depth += 1
            tokens[depth] = ends[at - 1]
            if shared < stop - start:
                break
        if depth == 0:
            continue
        for position in range(names.size):
            column = columns[_seat(workers, columns, names[position])]
            count = 0
            # Whoever was sent a node was sent all above it.
            while column != _NOBODY and count < depth:
                if times[path[count], column] < since[position]:
                    break
                count += 1
            found[position] = max(found[position], tokens[count])
    return found
