import numpy as np

from kvferry.config import EvictionPolicy
from mem_cache.eviction import EvictionOrder
from mem_cache.tree_node import TreeNode, new_root


def _order():
    return EvictionOrder(EvictionPolicy.LRU, _is_unlocked_leaf)


def _is_unlocked_leaf(node):
    return node.lock_ref == 0 and not node.children and node.parent is not None


def _leaf(root, number, accessed):
    leaf = TreeNode(number, root, b"\0\0\0\0", np.asarray([number], dtype=np.int64), accessed)
    root.children[bytes([number])] = leaf
    return leaf


def test_least_recently_accessed_first_and_older_nodes_first_among_equals():
    root, order = new_root(), _order()
    leaves = [_leaf(root, number, accessed) for number, accessed in ((1, 5), (2, 3), (3, 5))]
    for leaf in reversed(leaves):
        order.add(leaf)
    assert [order.pop(), order.pop(), order.pop()] == [leaves[1], leaves[0], leaves[2]]
    assert order.pop() is None


def test_a_later_access_moves_a_leaf_back():
    root, order = new_root(), _order()
    first, second = _leaf(root, 1, 1), _leaf(root, 2, 2)
    order.add(first)
    order.add(second)
    first.last_access = 9
    assert order.pop() is second
    assert order.pop() is first


def test_what_is_no_unlocked_leaf_any_more_is_passed_over():
    root, order = new_root(), _order()
    locked, parent, gone, left = (_leaf(root, number, number) for number in (1, 2, 3, 4))
    for leaf in (locked, parent, gone, left):
        order.add(leaf)
    locked.lock_ref = 1
    _leaf(parent, 5, 5)
    gone.parent = None
    assert order.pop() is left
    assert order.pop() is None
    assert locked not in order
    locked.lock_ref = 0
    order.add(locked)
    assert order.pop() is locked


def test_one_entry_per_node():
    root, order = new_root(), _order()
    leaf = _leaf(root, 1, 1)
    for _ in range(3):
        order.add(leaf)
    assert order.pop() is leaf
    assert order.pop() is None


def test_clear_forgets_but_lets_nodes_come_again():
    root, order = new_root(), _order()
    leaf = _leaf(root, 1, 1)
    order.add(leaf)
    order.clear()
    assert order.pop() is None
    order.add(leaf)
    assert order.pop() is leaf
