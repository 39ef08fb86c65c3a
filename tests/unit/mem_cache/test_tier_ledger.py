"""Each check of the second tier finds the fault it is for, and sound tiers have none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from mem_cache.errors import LedgerError
from tests.support.kv_caches import PAGE_SIZES, SHARED, compute, tiered_cache, tokens_of
from tests.support.manual_copier import ManualCopier

if TYPE_CHECKING:
    from mem_cache.kv_cache import KVCache
    from mem_cache.request_kv import RequestKV


@dataclass
class Scene:
    """Two pages on both tiers; then two on the host, on their way to `kv`; a write in flight."""

    cache: KVCache
    kv: RequestKV

    def nodes(self):
        """The edges: on both tiers, loading, writing."""
        nodes = list(self.cache.tree.nodes())
        both = next(node for node in nodes if node.on_device and node.on_host)
        loading = next(node for node in nodes if not node.on_device)
        writing = next(node for node in nodes if not node.on_host)
        return both, loading, writing

    def violations(self) -> str:
        with pytest.raises(LedgerError) as caught:
            self.cache.audit()
        return "\n".join(caught.value.violations)


@pytest.fixture(params=PAGE_SIZES)
def scene(request):
    size, copier = request.param, ManualCopier()
    cache = tiered_cache(size, copier, auditing=False)
    text = tokens_of(range(4 * size + 1))

    def serve(tokens, loads):
        kv = cache.open("served", tokens, SHARED)
        if loads and cache.load_back(kv, tokens):
            copier.run_all()
            cache.poll()
        compute(cache, kv, tokens, len(tokens) - 1)
        cache.release(kv, tokens[:-1])

    serve(text, loads=False)
    copier.run_all()
    cache.poll()
    filler = cache.open("filler", tokens_of([900]), SHARED)
    cache.extend(filler, 8 * size)
    cache.release(filler, None)
    serve(text[: 2 * size + 1], loads=True)
    kv = cache.open("kv", text, SHARED)
    cache.load_back(kv, text)
    serve(tokens_of(range(500, 501 + size)), loads=False)
    cache.audit()
    return Scene(cache, kv)


def test_1_a_host_slot_has_two_owners(scene):
    both, _, _ = scene.nodes()
    scene.cache.tree.host_slots.free(both.host_value)
    found = scene.violations()
    assert "check 1: slot" in found
    assert "has 2 owners: host allocator, host part of TreeNode(" in found


def test_1_a_host_slot_is_lost(scene):
    scene.cache.tree.host_slots.alloc(scene.cache.page_size)
    assert "has 0 owners: lost" in scene.violations()


def test_1_the_slots_of_a_load_are_freed_while_it_runs(scene):
    load = next(t for t in scene.cache.tier.transfers() if t.is_load)
    scene.cache.allocator.free(load.slots)
    assert "has 2 owners: allocator, load of TreeNode(" in scene.violations()


def test_1_the_slots_of_a_write_are_freed_while_it_runs(scene):
    write = next(t for t in scene.cache.tier.transfers() if not t.is_load)
    scene.cache.tree.host_slots.free(write.host_slots)
    assert "has 2 owners: host allocator, write of TreeNode(" in scene.violations()


@pytest.mark.parametrize("is_load", [True, False])
def test_1_a_copy_reads_other_slots_than_its_edges_hold(scene, is_load):
    transfer = next(t for t in scene.cache.tier.transfers() if t.is_load is is_load)
    (transfer.host_slots if is_load else transfer.slots)[0] += 1
    assert "reads other" in scene.violations()


def test_1_a_copy_covers_more_than_its_edges(scene):
    load = next(t for t in scene.cache.tier.transfers() if t.is_load)
    load.start -= scene.cache.page_size
    assert "is not as long as its edges" in scene.violations()


def test_2_host_slots_and_tokens_differ(scene):
    both, _, _ = scene.nodes()
    both.host_value = both.host_value[:-1]
    assert "check 2: TreeNode(" in scene.violations()


def test_5_an_edge_is_on_neither_tier(scene):
    _, loading, _ = scene.nodes()
    loading.host_value = loading.host_value[:0]
    assert "is on neither tier" in scene.violations()


def test_5_a_gap_on_the_device(scene):
    both, loading, _ = scene.nodes()
    both.value, loading.value = both.value[:0], both.value
    assert "is on the device, what goes before it is not" in scene.violations()


def test_5_a_gap_on_the_host(scene):
    both, _, _ = scene.nodes()
    both.host_value = both.host_value[:0]
    assert "is on the host, what goes before it is not" in scene.violations()


@pytest.mark.parametrize("count", ["device_children", "host_children"])
def test_5_followers_are_miscounted(scene, count):
    both, _, _ = scene.nodes()
    setattr(both, count, 7)
    assert "not what it counted" in scene.violations()


def test_5_the_hosts_eviction_cannot_find_a_candidate(scene):
    cache = scene.cache
    cache.tier.copier.run_all()
    cache.poll()
    cache.release(scene.kv, None)
    candidate = next(n for n in cache.tree.nodes() if cache.tree.is_host_evictable(n))
    cache.tree._host_order.clear()
    assert f"check 5: {candidate} is a candidate" in scene.violations()


def test_7_a_host_lock_is_lost(scene):
    _, loading, _ = scene.nodes()
    scene.cache.tree.host_unlock(loading)
    assert "should have host_lock_ref 1" in scene.violations()


def test_7_a_load_does_not_lock_the_device(scene):
    both, _, _ = scene.nodes()
    scene.cache.tree.unlock(both)
    assert "should have lock_ref 2" in scene.violations()


def test_7_locked_where_it_is_not(scene):
    _, loading, writing = scene.nodes()
    loading.lock_ref, writing.host_lock_ref = 1, 1
    found = scene.violations()
    assert "is locked without device slots" in found
    assert "is locked without host slots" in found


def test_7_the_sizes_told_are_not_those_of_the_edges(scene):
    scene.cache.tree._host_protected += 1
    found = scene.violations()
    assert "check 7: host sizes are told as" in found
    assert "check 8: host accounts do not add up" in found


def test_7_nobody_waits_for_a_load(scene):
    next(t for t in scene.cache.tier.transfers() if t.is_load).waiters.clear()
    assert "nobody waits for the load" in scene.violations()


def test_7_a_mark_without_a_copy(scene):
    both, loading, _ = scene.nodes()
    both.in_flight = loading.in_flight
    assert "are marked for copies that do not copy them" in scene.violations()


def test_9_nothing_is_copied_but_something_is_held(scene):
    cache = scene.cache
    cache.tier.copier.run_all()
    cache.poll()
    cache.tree.host_lock(scene.kv.last_node)
    assert "check 9: nothing is copied" in scene.violations()
