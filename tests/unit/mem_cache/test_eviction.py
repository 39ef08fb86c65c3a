import numpy as np
import pytest

from kvferry.config import CacheConfig, EvictionPolicy, HostTierConfig
from kvferry.kv_events import event_block_tokens
from mem_cache.eviction import EvictionOrder
from mem_cache.factory import assemble_kv_cache
from mem_cache.radix_cache import RadixCache
from mem_cache.tree_node import PrefixCache, TreeNode, new_root
from tests.support.kv_caches import SHARED, tiny_layout, tokens_of

POLICIES = tuple(EvictionPolicy)

LEAVES_FIRST = {
    EvictionPolicy.LRU: [1, 7, 2, 6, 4, 3, 5],
    EvictionPolicy.LFU: [2, 7, 1, 6, 4, 3, 5],
    EvictionPolicy.FIFO: [3, 1, 7, 2, 6, 5, 4],
    EvictionPolicy.FILO: [4, 5, 6, 2, 7, 1, 3],
    EvictionPolicy.MRU: [5, 3, 4, 6, 2, 7, 1],
    EvictionPolicy.PRIORITY: [6, 1, 7, 2, 4, 3, 5],
    EvictionPolicy.SLRU: [7, 2, 1, 6, 4, 3, 5],
}
"""The order in which the prompts of `_trace` go, by policy."""


def _trace(tree: PrefixCache) -> None:
    """One-page prompts 1 to 7: an insert, or a hit, of one after the other.

    1 is the least recently used, 2 was never hit, 3 is the oldest, 4 the newest, 5 the most
    recently used, 6 has the lowest priority, 7 was hit once before 2 came.
    """
    seen: set[int] = set()
    for kind in (3, 1, 1, 1, 7, 7, 2, 6, 6, 6, 5, 4, 4, 4, 3, 3, 5, 5):
        if kind in seen:
            assert tree.match_prefix(tokens_of([kind]), SHARED).length == 1
        else:
            slot = np.asarray([kind], dtype=np.int64)
            tree.insert(tokens_of([kind]), slot, SHARED, priority=0 if kind == 6 else 1)
            seen.add(kind)


@pytest.mark.parametrize("policy", POLICIES)
def test_each_policy_has_its_own_order(policy):
    tree = RadixCache(1, event_block_tokens(1), policy)
    _trace(tree)
    assert [int(tree.evict(1)[0]) for _ in range(7)] == LEAVES_FIRST[policy]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("host_bytes", [0, 100_000])
def test_the_configured_policy_is_the_tree_s(policy, host_bytes):
    host = HostTierConfig(memory_bytes=host_bytes)
    config = CacheConfig(page_size=1, eviction=policy, host=host)
    tree = assemble_kv_cache(tiny_layout(1), config, 16, context_length=16).tree
    _trace(tree)
    assert [int(tree.evict(1)[0]) for _ in range(7)] == LEAVES_FIRST[policy]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("host_bytes", [0, 100_000])
def test_what_leads_to_other_cache_goes_after_it_under_every_policy(policy, host_bytes):
    host = HostTierConfig(memory_bytes=host_bytes)
    config = CacheConfig(page_size=1, eviction=policy, host=host)
    cache = assemble_kv_cache(tiny_layout(1), config, 16, context_length=16)
    for text in ([1], [1, 2], [1, 3], [1, 3, 4]):
        slots = np.asarray(text, dtype=np.int64)
        cache.tree.insert(tokens_of(text), slots, SHARED, owned_from=len(text) - 1)
    order = [int(cache.tree.evict(1)[0]) for _ in range(4)]
    assert order[-1] == 1
    assert order.index(4) < order.index(3)
    cache.close()


def test_no_two_policies_begin_with_the_same_leaf():
    assert len({order[0] for order in LEAVES_FIRST.values()}) == len(POLICIES) == 7


def _order(policy=EvictionPolicy.LRU):
    return EvictionOrder(policy, _is_unlocked_leaf)


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


def test_of_equal_rank_the_deepest_first():
    root, order = new_root(), EvictionOrder(EvictionPolicy.LRU, lambda node: True)
    upper = _leaf(root, 1, 5)
    lower = _leaf(upper, 2, 5)
    for node in (upper, lower):
        order.add(node)
    assert [order.pop(), order.pop()] == [lower, upper]


@pytest.mark.parametrize("later", [9, 1_000_000])
def test_a_later_access_moves_a_leaf_back(later):
    root, order = new_root(), _order()
    first, second = _leaf(root, 1, 1), _leaf(root, 2, 2)
    order.add(first)
    order.add(second)
    first.last_access = later
    assert order.pop() is second
    assert order.pop() is first
    assert order.pop() is None


def test_what_comes_in_late_with_a_low_rank_is_not_overlooked():
    """Buckets that were sorted before are still right when a lower one appears."""
    root, order = new_root(), _order()
    late = [_leaf(root, number, 100_000 + number) for number in (1, 2, 3)]
    for leaf in late:
        order.add(leaf)
    assert order.pop() is late[0]
    early = _leaf(root, 4, 7)
    between = _leaf(root, 5, 100_002)
    for leaf in (between, early):
        order.add(leaf)
    assert [order.pop() for _ in range(4)] == [early, late[1], between, late[2]]


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


def test_what_is_locked_after_its_neighbours_were_sorted_is_passed_over():
    root, order = new_root(), _order()
    leaves = [_leaf(root, number, number) for number in (1, 2, 3)]
    for leaf in leaves:
        order.add(leaf)
    assert order.pop() is leaves[0]
    leaves[1].lock_ref = 1
    assert order.pop() is leaves[2]
    assert order.pop() is None
    assert leaves[1] not in order


@pytest.mark.parametrize("policy", POLICIES)
def test_one_entry_per_node(policy):
    root, order = new_root(), _order(policy)
    leaf = _leaf(root, 1, 1)
    for _ in range(3):
        order.add(leaf)
    assert len(order) == 1
    assert order.pop() is leaf
    assert order.pop() is None


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("step", [1, 100, 5_000])
def test_accesses_do_not_make_it_grow(policy, step):
    root, order = new_root(), _order(policy)
    leaves = [_leaf(root, number, number) for number in range(1, 11)]
    for leaf in leaves:
        order.add(leaf)
    for turn in range(2_000):
        leaf = leaves[turn % 7]
        leaf.last_access, leaf.hit_count = 100 + step * turn, leaf.hit_count + 1
        order.touched(leaf)
        if turn % 100 == 50:
            victim = order.pop()
            assert victim is not None
            order.add(victim)
        assert len(order) <= 2 * len(leaves) + 64
    assert sorted(leaf.node_id for leaf in iter(order.pop, None)) == list(range(1, 11))
    assert len(order) == 0


def test_clear_forgets_but_lets_nodes_come_again():
    root, order = new_root(), _order()
    leaf = _leaf(root, 1, 1)
    order.add(leaf)
    order.clear()
    assert order.pop() is None
    assert len(order) == 0
    order.add(leaf)
    assert order.pop() is leaf
