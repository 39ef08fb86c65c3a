"""A part of an index, shown to people: the most used of it, bounded, and without a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvferry.ids import ExtraKey
from kvferry.tree_view import TreeQuery
from mem_cache import tree_view
from mem_cache.radix_cache import RadixCache
from mem_cache.tree_view import view_tree

if TYPE_CHECKING:
    import pytest

PAGE = 4
NONE = ExtraKey("")
ALL = TreeQuery(nodes_max=100, depth_max=100, tokens_max=8)


def filled(*keys: list[int], extra_key: ExtraKey = NONE) -> RadixCache:
    tree = RadixCache(PAGE, 16)
    for number, key in enumerate(keys):
        slots = np.arange(len(key), dtype=np.int64) + 1000 * (number + 1)
        tree.insert(np.array(key, dtype=np.int32), slots, extra_key)
    return tree


def key(*pages: int) -> list[int]:
    return [10 * page + position for page in pages for position in range(PAGE)]


def test_what_is_there_parents_first():
    tree = filled(key(1, 2), key(1, 3, 4))
    view = view_tree(tree, ALL)
    upper, *lower = view.nodes
    assert (upper.parent_id, upper.start, upper.length, upper.children) == (0, 0, 4, 2)
    assert {(node.parent_id, node.start, node.length) for node in lower} == {
        (upper.node_id, 4, 4),
        (upper.node_id, 4, 8),
    }
    assert view.is_whole
    assert (view.path, view.path_tokens, view.evictable, view.protected) == ((), 0, 16, 0)


def test_only_the_first_tokens_of_an_edge_and_none_unless_asked():
    tree = filled(key(1, 2, 3))
    (node,) = view_tree(tree, ALL).nodes
    assert node.tokens == (10, 11, 12, 13, 20, 21, 22, 23)
    (node,) = view_tree(tree, TreeQuery(100, 100, 0)).nodes
    assert node.tokens == ()


def test_what_is_in_use_comes_first_then_what_is_hit_most():
    tree = filled(key(1), key(2), key(3), key(4))
    for page, times in ((1, 1), (2, 3), (3, 2)):
        for _ in range(times):
            tree.match_prefix(np.array(key(page), dtype=np.int32), NONE)
    tree.lock(tree.match_prefix(np.array(key(4), dtype=np.int32), NONE).last_device_node)
    view = view_tree(tree, TreeQuery(nodes_max=3, depth_max=9, tokens_max=1))
    assert [node.tokens for node in view.nodes] == [(40,), (20,), (30,)]
    assert [node.lock_ref for node in view.nodes] == [1, 0, 0]
    assert not view.is_whole
    assert (view.evictable, view.protected) == (12, 4)


def test_a_view_below_a_node_and_one_that_is_cut_at_a_depth():
    tree = filled(key(1, 2), key(1, 3), key(1, 3, 4), key(5))
    top = next(node for node in view_tree(tree, ALL).nodes if node.children == 2)
    view = view_tree(tree, TreeQuery(100, 1, 0, (top.node_id,)))
    assert (view.path, view.path_tokens) == ((top.node_id,), 4)
    assert len(view.nodes) == 2
    assert {node.parent_id for node in view.nodes} == {top.node_id}
    assert not view.is_whole
    assert view_tree(tree, TreeQuery(100, 2, 0, (top.node_id,))).is_whole


def test_a_path_that_is_no_longer_there_leads_as_far_as_it_can():
    tree = filled(key(1, 2), key(1, 3))
    top = next(node for node in view_tree(tree, ALL).nodes if node.children)
    view = view_tree(tree, TreeQuery(100, 100, 0, (top.node_id, 999_999)))
    assert view.path == (top.node_id,)
    assert view_tree(tree, TreeQuery(100, 100, 0, (999_999,))).path == ()


def test_of_very_many_children_the_newest_are_looked_at(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tree_view, "TREE_NODES_LOOKED_AT_MAX", 3)
    view = view_tree(filled(*(key(page) for page in range(1, 9))), TreeQuery(100, 9, 1))
    assert {node.tokens for node in view.nodes} == {(60,), (70,), (80,)}
    assert not view.is_whole


def test_looking_changes_nothing():
    tree = filled(key(1, 2), key(1, 3))
    tree.take_events()

    def state() -> list[tuple[int, ...]]:
        return [
            (node.node_id, node.hit_count, node.last_access, node.lock_ref) for node in tree.nodes()
        ]

    before = state()
    view_tree(tree, ALL)
    assert state() == before
    assert tree.take_events() == []


def test_the_salt_of_a_namespace_is_not_shown():
    secret = ExtraKey("weights/salt-of-a-tenant")
    (node,) = view_tree(filled(key(1), extra_key=secret), ALL).nodes
    (other,) = view_tree(filled(key(1), extra_key=NONE), ALL).nodes
    assert "salt" not in node.namespace
    assert node.namespace not in (other.namespace, "")
