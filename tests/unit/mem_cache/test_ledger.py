"""Each of the nine checks finds the fault it is for, and a sound cache has none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from mem_cache.errors import LedgerError
from tests.support.kv_caches import PAGE_SIZES, SHARED, compute, tiny_cache, tokens_of

if TYPE_CHECKING:
    from mem_cache.kv_cache import KVCache
    from mem_cache.request_kv import RequestKV


@dataclass
class Scene:
    """A cache with a published text, two requests that read it, one of them inbound."""

    cache: KVCache
    local: RequestKV
    inbound: RequestKV

    def violations(self) -> str:
        with pytest.raises(LedgerError) as caught:
            self.cache.audit()
        return "\n".join(caught.value.violations)


@pytest.fixture(params=PAGE_SIZES)
def scene(request):
    size = request.param
    cache = tiny_cache(size, auditing=False)
    text = tokens_of(range(3 * size + 1))
    first = cache.open("first", text, SHARED)
    compute(cache, first, text, 2 * size)
    cache.release(first, text)
    local = cache.open("local", text, SHARED)
    compute(cache, local, text, len(text))
    inbound = cache.open("inbound", text, SHARED, inbound=True)
    cache.extend(inbound, len(text))
    cache.audit()
    return Scene(cache, local, inbound)


def test_check_1_a_slot_has_two_owners(scene):
    cache, kv = scene.cache, scene.local
    size = cache.page_size
    cache.rows.write(kv.req_pool_idx, 2 * size, cache.slots(scene.inbound, 2 * size, 3 * size))
    assert "has 2 owners: local, inbound" in scene.violations()


def test_check_1_a_slot_is_lost(scene):
    scene.cache.allocator.alloc(scene.cache.page_size)
    assert "has 0 owners: lost" in scene.violations()


def test_check_1_a_slot_is_freed_while_it_is_read(scene):
    scene.cache.allocator.free(scene.local.last_node.value)
    assert "has 2 owners: allocator, TreeNode(" in scene.violations()


def test_check_1_a_slot_is_out_of_range(scene):
    scene.local.last_node.value[0] = 0
    assert "slots out of range: [0]" in scene.violations()


def test_check_1_an_owner_has_parts_of_pages():
    cache = tiny_cache(4, auditing=False)
    kv = cache.open("a", tokens_of([1]), SHARED)
    slots = cache.extend(kv, 8)
    cache.rows.write(kv.req_pool_idx, 0, slots[::-1].copy())
    with pytest.raises(LedgerError, match="a does not own whole pages"):
        cache.audit()


def test_check_2_key_and_slots_differ_in_length(scene):
    node = scene.local.last_node
    node.key += b"\0\0\0\0"
    assert "check 2: TreeNode(" in scene.violations()


def test_check_3_the_row_reads_other_slots_than_the_tree_holds(scene):
    cache, kv = scene.cache, scene.local
    cache.rows.write(kv.req_pool_idx, 0, cache.allocator.free_slots()[:1])
    assert "check 3: the row of RequestKV(local" in scene.violations()


def test_check_3_the_lock_is_not_where_the_protected_part_ends(scene):
    scene.local.last_node = scene.cache.tree.root
    assert "check 3: RequestKV(local" in scene.violations()


@pytest.mark.parametrize("field", ["committed_len", "allocated_len"])
def test_check_4_intervals_are_not_in_order(scene, field):
    setattr(scene.local, field, scene.local.cache_protected_len - scene.cache.page_size)
    assert "check 4: intervals are not in order" in scene.violations()


def test_check_4_is_made_at_release(scene):
    scene.local.committed_len = scene.local.allocated_len + 1
    with pytest.raises(AssertionError, match="check 4"):
        scene.cache.release(scene.local, None)


def test_check_5_eviction_cannot_find_a_leaf(scene):
    cache = scene.cache
    kv = cache.open("left", tokens_of([900] * (cache.page_size + 1)), SHARED)
    compute(cache, kv, tokens_of([900] * cache.page_size), cache.page_size)
    cache.release(kv, tokens_of([900] * cache.page_size))
    (leaf,) = (node for node in cache.tree.nodes() if cache.tree.is_evictable(node))
    cache.tree._order._queued.pop(leaf.node_id)
    assert "check 5: TreeNode(" in scene.violations()


def test_check_6_a_row_was_given_to_another(scene):
    scene.cache.rows.clear()
    assert "check 6: RequestKV(local" in scene.violations()


def test_check_7_a_lock_is_lost(scene):
    scene.cache.tree.unlock(scene.local.last_node)
    assert "should have lock_ref 2" in scene.violations()


def test_check_7_a_lock_too_many(scene):
    scene.cache.tree.lock(scene.local.last_node)
    assert "should have lock_ref 2" in scene.violations()


def test_check_7_only_the_last_node_is_locked(scene):
    """The upper half of a split edge must be as locked as the lower."""
    scene.cache.tree.match_prefix(tokens_of(range(scene.cache.page_size)), SHARED)
    upper = scene.local.last_node.parent
    assert upper is not None
    upper.lock_ref = 0
    assert "should have lock_ref 2" in scene.violations()


def test_check_7_the_sizes_told_are_not_those_of_the_nodes(scene):
    scene.cache.tree._protected += 1
    assert "check 7: protected size is told as" in scene.violations()


def test_check_8_the_accounts_do_not_add_up(scene):
    scene.cache.tree._evictable -= 1
    assert "check 8: accounts do not add up" in scene.violations()


def test_check_8_a_row_is_lost(scene):
    scene.cache.rows._free.pop()
    assert "check 8: 5 free rows and 2 live ones" in scene.violations()


def test_check_8_a_row_has_two_owners(scene):
    scene.cache.rows._free[0] = scene.local.req_pool_idx
    assert "check 8: a row has two owners" in scene.violations()


def test_check_9_idle_but_something_is_still_held(scene):
    cache = scene.cache
    cache.release(scene.local, None)
    cache.release(scene.inbound, None)
    cache.audit()
    cache.tree.lock(next(iter(cache.tree.nodes())))
    assert "check 9: idle, but not all is given back" in scene.violations()


def test_inbound_kv_was_published(scene):
    kv, size = scene.inbound, scene.cache.page_size
    scene.cache.commit(kv, 3 * size)
    kv.inbound = False
    scene.cache.checkpoint(kv, tokens_of(range(3 * size)))
    kv.inbound = True
    assert "published while inbound" in scene.violations()


def test_a_broken_edge_is_found(scene):
    node = scene.local.last_node
    node.end += 1
    assert "does not begin where its parent ends" in scene.violations()


def test_an_orphan_is_found(scene):
    node = scene.local.last_node
    node.child_key = b"elsewhere"
    assert "is not its parent's child" in scene.violations()


def test_all_violations_are_listed_at_once(scene):
    scene.cache.tree._evictable -= 1
    scene.cache.rows._free.pop()
    found = scene.violations()
    assert "check 7" in found
    assert found.count("check 8") == 2


def test_an_auditing_cache_stops_at_the_call_that_broke_it():
    cache = tiny_cache(4, auditing=True)
    cache.allocator.alloc(4)
    with pytest.raises(LedgerError, match="lost"):
        cache.open("a", tokens_of([1]), SHARED)
