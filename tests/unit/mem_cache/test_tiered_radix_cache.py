"""Which edge is on which tier, who may leave it, and what is told of it."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.config import EvictionPolicy
from kvferry.ids import ExtraKey
from mem_cache.slot_allocator import TokenToKVPoolAllocator
from mem_cache.tiered_radix_cache import TieredRadixCache
from tests.support.kv_caches import tokens_of

KEY = ExtraKey("")
EVICTION_OF_THREE = {
    EvictionPolicy.LRU: [1, 2, 0],
    EvictionPolicy.MRU: [0, 2, 1],
    EvictionPolicy.FIFO: [0, 1, 2],
    EvictionPolicy.FILO: [2, 1, 0],
}
"""Three texts stored in order, after the first one was hit."""


class Bench:
    """A tree of page size 1 whose device slots are numbered as they come; 10 host slots."""

    def __init__(self, policy=EvictionPolicy.LRU):
        self.host = TokenToKVPoolAllocator(10)
        self.tree = TieredRadixCache(1, 16, policy, self.host)
        self.slots = 0

    def insert(self, text):
        value = np.arange(self.slots, self.slots + len(text), dtype=np.int64)
        self.slots += len(text)
        return self.tree.insert(tokens_of(text), value, KEY)

    def match(self, text):
        return self.tree.match_prefix(tokens_of(text), KEY)

    def keep(self, node):
        slots = self.tree.take_host_slots(node.length)
        assert slots is not None
        self.tree.keep(node, slots)


def on_host(text, policy=EvictionPolicy.LRU):
    """A text on the host only."""
    bench = Bench(policy)
    node = bench.insert(text).last_node
    bench.keep(node)
    assert len(bench.tree.evict(len(text))) == len(text)
    return bench, node


def test_a_match_tells_the_tiers_apart():
    bench, node = on_host([1, 2, 3])
    match = bench.match([1, 2, 3, 4])
    assert (match.length, match.last_device_node) == (0, bench.tree.root)
    assert match.last_host_node is match.best_match_node is node
    bench.tree.fill(node, np.arange(3))
    below = bench.insert([1, 2, 3, 4]).last_node
    match = bench.match([1, 2, 3, 4])
    assert (match.length, match.last_device_node, match.best_match_node) == (4, below, below)
    assert match.last_host_node is node


def test_what_leaves_the_device_stays_in_the_tree_if_the_host_has_it():
    bench, node = on_host([1, 2, 3])
    assert list(bench.tree.nodes()) == [node]
    assert (node.on_device, node.on_host) == (False, True)
    assert (bench.tree.evictable_size(), bench.tree.host_evictable_size()) == (0, 3)
    other = bench.insert([7, 8])
    bench.tree.evict(2)
    assert other.last_node.parent is None, "nobody kept it"


def test_the_last_chance_to_keep_an_edge():
    bench = Bench()
    node = bench.insert([1, 2]).last_node
    bench.tree.before_eviction = bench.keep
    bench.tree.evict(2)
    assert (node.on_device, node.on_host) == (False, True)


def test_a_split_keeps_both_tiers_and_all_marks():
    bench, node = on_host([1, 2, 3, 4])
    bench.tree.host_lock(node)
    slots = node.host_value.tolist()
    upper = bench.match([1, 2, 9]).best_match_node
    assert node.parent is upper
    assert upper.host_value.tolist() + node.host_value.tolist() == slots
    assert (upper.device_children, upper.host_children) == (0, 1)
    assert upper.host_lock_ref == 1
    bench.tree.host_unlock(node)
    assert (upper.host_lock_ref, bench.tree.host_protected_size()) == (0, 0)


def test_an_edge_that_ends_somewhere():
    bench, node = on_host([1, 2, 3, 4])
    assert bench.tree.edge_ending_at(node, 4) is node
    upper = bench.tree.edge_ending_at(node, 1)
    assert (upper.end, node.start) == (1, 1)
    assert bench.tree.edge_ending_at(node, 1) is upper
    assert bench.tree.path_host_indices(node, 1).tolist() == node.host_value.tolist()


def test_insert_takes_over_what_is_on_the_host_alone():
    bench, node = on_host([1, 2, 3])
    first = bench.slots
    result = bench.insert([1, 2, 3, 4])
    assert result.matched_len == 0, "only what is on the device is matched"
    assert len(result.duplicates) == 0
    assert node.value.tolist() == [first, first + 1, first + 2]
    again = bench.insert([1, 2, 3, 4])
    assert (again.matched_len, len(again.duplicates)) == (4, 4)


def test_slots_handed_over_for_the_head_only():
    """The path is on the device up to 2, on the host up to 4; a request publishes all of it."""
    bench, node = on_host([1, 2, 3, 4])
    upper = bench.tree.edge_ending_at(node, 2)
    bench.tree.fill(upper, np.array([50, 51]))
    result = bench.insert([1, 2, 3, 4])
    assert (result.matched_len, result.duplicates.tolist()) == (2, [4, 5])
    assert bench.tree.path_device_indices(node).tolist() == [50, 51, 6, 7]


@pytest.mark.parametrize("policy", EVICTION_OF_THREE)
def test_the_host_evicts_by_the_same_policy(policy):
    bench = Bench(policy)
    nodes = [bench.insert([number, 100]).last_node for number in range(3)]
    for node in nodes:
        bench.keep(node)
    bench.tree.evict(6)
    bench.match([0, 100])
    gone = []
    for _ in range(3):
        taken = bench.tree.take_host_slots(bench.host.num_free + 2)
        gone += [n for n, node in enumerate(nodes) if node.parent is None and n not in gone]
        bench.host.free(taken)
    assert gone == EVICTION_OF_THREE[policy]


def test_the_host_evicts_what_nothing_on_it_follows():
    bench, node = on_host([1, 2, 3, 4])
    upper = bench.tree.edge_ending_at(node, 2)
    assert len(bench.tree.take_host_slots(8)) == 8
    assert (node.parent, upper.on_host) == (None, True)
    assert bench.tree.take_host_slots(3) is None, "with nothing changed"
    assert upper.on_host


def test_what_the_host_evicts_stays_on_the_device():
    bench = Bench()
    node = bench.insert([1, 2]).last_node
    bench.keep(node)
    bench.tree.take_host_slots(10)
    assert (node.on_device, node.on_host) == (True, False)
    bench.tree.evict(2)
    assert node.parent is None


def test_locks_of_one_tier_do_not_hold_the_other():
    bench = Bench()
    node = bench.insert([1, 2]).last_node
    bench.keep(node)
    bench.tree.host_lock(node)
    assert len(bench.tree.evict(2)) == 2
    assert bench.tree.take_host_slots(9) is None
    bench.tree.host_unlock(node)
    with pytest.raises(AssertionError, match="once too often"):
        bench.tree.host_unlock(node)


@pytest.mark.parametrize("where", ["fill", "keep"])
def test_an_edge_gets_slots_of_a_tier_once(where):
    bench = Bench()
    node = bench.insert([1, 2]).last_node
    bench.keep(node)
    with pytest.raises(AssertionError, match=r"has .*slots already"):
        (bench.tree.fill if where == "fill" else bench.tree.keep)(node, np.arange(2))


def test_a_copied_edge_is_not_removed():
    bench = Bench()
    node = bench.insert([1, 2]).last_node
    node.in_flight = object()
    with pytest.raises(AssertionError, match="while it is copied"):
        bench.tree.evict(2)


def test_reset_gives_back_both_tiers():
    bench, _ = on_host([1, 2, 3])
    bench.insert([7, 8])
    assert len(bench.tree.reset()) == 2
    assert bench.host.num_free == 10
    assert (bench.tree.host_evictable_size(), list(bench.tree.nodes())) == (0, [])
    node = bench.insert([1]).last_node
    bench.keep(node)
    bench.tree.host_lock(node)
    with pytest.raises(AssertionError, match="locked"):
        bench.tree.reset()
