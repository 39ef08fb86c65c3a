"""The prompts of a trace as one compressed tree, made once for all policies.

A node is a run of blocks that every prompt takes whole or not at all, so that a cache need only
know how many blocks of each node it holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class _Node:
    __slots__ = ("children", "label", "number", "parent")

    def __init__(self, parent: _Node | None, label: NDArray[np.int64]) -> None:
        self.parent = parent
        self.label = label
        self.children: dict[int, _Node] = {}
        self.number = 0


@dataclass(frozen=True, slots=True)
class PromptTree:
    """Nodes numbered from 0."""

    node_blocks: NDArray[np.int64]
    """Blocks of each node."""
    paths: tuple[NDArray[np.int64], ...]
    """Of each prompt: its nodes from the root down."""


class PromptTreeBuilder:
    """Takes the prompts of a trace one after the other."""

    def __init__(self) -> None:
        self._roots: dict[tuple[int, int], _Node] = {}
        self._ends: list[_Node] = []

    def add(self, space: int, blocks: NDArray[np.int64]) -> None:
        """Add a prompt of at least one block; numbers are those of `space` alone."""
        origin = (space, int(blocks[0]))
        node = self._roots.get(origin)
        if node is None:
            node = self._roots[origin] = _Node(None, blocks)
            self._ends.append(node)
            return
        while True:
            shared = _shared(node.label, blocks)
            if shared < node.label.size:
                node = self._split(node, shared, origin)
            blocks = blocks[shared:]
            if not blocks.size:
                break
            child = node.children.get(int(blocks[0]))
            if child is None:
                child = node.children[int(blocks[0])] = _Node(node, blocks)
                node = child
                break
            node = child
        self._ends.append(node)

    def build(self) -> PromptTree:
        """The tree of all prompts added."""
        nodes: list[_Node] = []
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            node.number = len(nodes)
            nodes.append(node)
            stack.extend(node.children.values())
        sizes = np.array([node.label.size for node in nodes], dtype=np.int64)
        return PromptTree(sizes, tuple(_path(end) for end in self._ends))

    def _split(self, lower: _Node, at: int, origin: tuple[int, int]) -> _Node:
        """Cut a node in two; the lower part keeps its identity, prompts that end there stay."""
        upper = _Node(lower.parent, lower.label[:at])
        if lower.parent is None:
            self._roots[origin] = upper
        else:
            lower.parent.children[int(upper.label[0])] = upper
        lower.parent = upper
        lower.label = lower.label[at:]
        upper.children[int(lower.label[0])] = lower
        return upper


def _shared(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    length = min(one.size, other.size)
    differs = one[:length] != other[:length]
    first = int(differs.argmax())
    return first if differs[first] else length


def _path(end: _Node) -> NDArray[np.int64]:
    numbers: list[int] = []
    node: _Node | None = end
    while node is not None:
        numbers.append(node.number)
        node = node.parent
    return np.array(numbers[::-1], dtype=np.int64)
