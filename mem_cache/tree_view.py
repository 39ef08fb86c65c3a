"""Shows a part of an index to people, without changing it: no edge is split, nothing is accessed.

The work is bounded by the nodes that are looked at, not by the size of the index: of very many
children the newest are considered, and the best of what is considered is shown.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from typing import TYPE_CHECKING

import numpy as np

from kvferry.limits import TREE_NODES_LOOKED_AT_MAX
from kvferry.tree_view import NodeView, TreeView
from mem_cache.tree_node import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvferry.tree_view import TreeQuery
    from mem_cache.tree_node import PrefixCache, TreeNode


def view_tree(tree: PrefixCache, query: TreeQuery) -> TreeView:
    """What `query` asks for, or less of it where that is no more."""
    path = _find(tree.root, query.path)
    top = path[-1] if path else tree.root
    shown, left_out = _choose(top, query)
    return TreeView(
        path=tuple(node.node_id for node in path),
        path_tokens=top.end,
        nodes=tuple(_view(node, query.tokens_max) for node in shown),
        evictable=tree.evictable_size(),
        protected=tree.protected_size(),
        is_whole=not left_out,
    )


def _find(root: TreeNode, ids: tuple[int, ...]) -> list[TreeNode]:
    """The nodes of a path; it ends where one is no longer there."""
    path: list[TreeNode] = []
    node = root
    for node_id in ids:
        for child in _newest_children(node, TREE_NODES_LOOKED_AT_MAX):
            if child.node_id == node_id:
                path.append(child)
                node = child
                break
        else:
            break
    return path


def _choose(top: TreeNode, query: TreeQuery) -> tuple[list[TreeNode], bool]:
    """The best nodes below `top`, each after the one above it; and whether any was left out."""
    budget = TREE_NODES_LOOKED_AT_MAX
    heap: list[tuple[tuple[bool, int, int], int, int, TreeNode]] = []
    shown: list[TreeNode] = []
    left_out = False
    node, depth = top, 0
    while True:
        if depth < query.depth_max:
            children = list(_newest_children(node, budget))
            budget -= len(children)
            left_out |= len(children) < len(node.children)
            for child in children:
                heapq.heappush(heap, (_rank(child), child.node_id, depth + 1, child))
        else:
            left_out |= bool(node.children)
        if not heap or len(shown) == query.nodes_max:
            return shown, left_out or bool(heap)
        _, _, depth, node = heapq.heappop(heap)
        shown.append(node)


def _newest_children(node: TreeNode, count: int) -> Iterator[TreeNode]:
    return itertools.islice(reversed(node.children.values()), count)


def _rank(node: TreeNode) -> tuple[bool, int, int]:
    """Lowest first: in use, often hit, lately accessed."""
    return node.lock_ref == 0, -node.hit_count, -node.last_access


def _view(node: TreeNode, tokens_max: int) -> NodeView:
    parent = node.parent
    assert parent is not None, "the root is not shown"
    head = np.frombuffer(node.key, dtype="<i4", count=min(tokens_max, len(node.key) // TOKEN_BYTES))
    return NodeView(
        node_id=node.node_id,
        parent_id=parent.node_id,
        start=node.start,
        length=node.length,
        lock_ref=node.lock_ref,
        hits=node.hit_count,
        last_access=node.last_access,
        children=len(node.children),
        on_device=node.on_device,
        on_host=node.on_host,
        priority=node.priority,
        namespace="" if parent.parent is not None else _namespace(node.extra_key),
        tokens=tuple(head.tolist()),
    )


def _namespace(extra_key: str) -> str:
    """A digest: the key itself has the client's salt in it, which is a secret."""
    return hashlib.sha256(extra_key.encode()).hexdigest()[:8]
