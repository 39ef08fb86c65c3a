"""What leaves the device lives on, and what the host tier shows of itself."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvferry.config import WritePolicy
from kvferry.kv_events import BlocksRemoved, BlocksStored, event_block_tokens, prompt_block_hashes
from mem_cache.copier import ThreadCopier
from mem_cache.errors import OutOfSlots
from tests.support.kv_caches import (
    PAGE_SIZES,
    SHARED,
    assert_reads_its_tokens,
    compute,
    tiered_cache,
    tiny_cache,
    tokens_of,
    write_stamps,
)
from tests.support.tier_scene import Scene, scene_on_host

every_page_size = pytest.mark.parametrize("page_size", PAGE_SIZES)
every_policy = pytest.mark.parametrize("write_policy", WritePolicy)


# --- going there ---------------------------------------------------------------------------------


def test_write_through_copies_what_is_published():
    scene = Scene()
    text = scene.pages(1, 3)
    kv = scene.open(text)
    compute(scene.cache, kv, text, 8)
    scene.cache.checkpoint(kv, text[:8])
    assert scene.cache.host_accounts().writing == 8
    scene.settle()
    compute(scene.cache, kv, text, len(text))
    scene.cache.checkpoint(kv, text)
    assert scene.cache.host_accounts().writing == 4, "only what the host lacks"
    scene.settle()
    assert scene.cache.host_accounts().evictable == 12
    scene.cache.release(kv, text)
    assert scene.cache.copies_in_flight == 0


def test_selective_copies_at_the_second_hit():
    scene = Scene(write_policy=WritePolicy.WRITE_THROUGH_SELECTIVE)
    text = scene.pages(1, 3)
    scene.publish(text)
    scene.cache.release(scene.open(text), None)
    assert scene.cache.copies_in_flight == 0
    scene.cache.release(scene.open(text[:9]), None)
    assert scene.cache.host_accounts().writing == 8, "only what was hit twice"


def test_write_back_copies_at_eviction():
    scene = Scene(write_policy=WritePolicy.WRITE_BACK)
    text = scene.pages(1, 3)
    scene.publish(text)
    assert scene.cache.host_accounts().free == 32 * 4
    scene.push_out()
    assert scene.cache.host_accounts().evictable == 12
    kv = scene.open(text)
    assert scene.cache.load_back(kv, text) == 12
    scene.settle()
    assert_reads_its_tokens(scene.cache, kv, text)


def test_eviction_finishes_the_writes_of_what_it_takes():
    """A request published by chunks and ended; its writes are still queued, in two copies."""
    scene = Scene()
    text = scene.pages(1, 3)
    kv = scene.open(text)
    compute(scene.cache, kv, text, 8)
    scene.cache.checkpoint(kv, text[:8])
    compute(scene.cache, kv, text, len(text))
    scene.cache.release(kv, text)
    assert scene.cache.copies_in_flight == 2
    assert scene.cache.accounts().evictable == 12, "a write does not keep slots from others"
    scene.push_out()
    assert scene.cache.copies_in_flight == 0
    again = scene.open(text)
    assert scene.cache.load_back(again, text) == 12
    scene.settle()
    assert_reads_its_tokens(scene.cache, again, text)


@every_policy
def test_a_failed_write_loses_the_copy_and_nothing_else(write_policy):
    scene = Scene(write_policy=write_policy)
    text = scene.pages(1, 3)
    scene.copier.finish_fails = RuntimeError("no memory")
    kv = scene.open(text)
    compute(scene.cache, kv, text, len(text))
    scene.cache.release(kv, text)
    for name in "bc":
        scene.cache.release(scene.open(text, name), None)
    assert_same = scene.open(text)
    assert_reads_its_tokens(scene.cache, assert_same, text)
    scene.cache.release(assert_same, None)
    scene.push_out()
    assert scene.cache.host_accounts().free == 32 * 4
    assert list(scene.cache.tree.nodes()) == []
    assert scene.cache.tier.statistics.failed > 0


def test_a_write_whose_beginning_failed_is_dropped():
    """What is on the host has no gaps."""
    scene = Scene()
    text = scene.pages(1, 3)
    kv = scene.open(text)
    compute(scene.cache, kv, text, 8)
    scene.cache.checkpoint(kv, text[:8])
    compute(scene.cache, kv, text, len(text))
    scene.cache.checkpoint(kv, text)
    scene.copier.run(1)
    scene.cache.poll()
    assert scene.cache.host_accounts().evictable == 0
    scene.copier.run(error=RuntimeError("no memory"))
    scene.cache.poll()
    assert scene.cache.host_accounts().free == 32 * 4
    scene.cache.release(kv, text)
    kv = scene.open(text)
    compute(scene.cache, kv, text, len(text))
    longer = tokens_of([*text[:12], *range(80, 84)])
    scene.cache.release(kv, None)
    scene.publish(longer)
    assert scene.cache.host_accounts().evictable == 16, "tried again with what follows it"


def test_a_full_host_evicts_its_own_and_skips_what_cannot_fit():
    scene = Scene(host_pages=4)
    scene.publish(scene.pages(1, 3))
    scene.publish(scene.pages(2, 3))
    accounts = scene.cache.host_accounts()
    assert (accounts.free, accounts.evictable) == (4, 12)
    assert scene.cache.accounts().evictable == 24, "the device still has both"
    scene.publish(scene.pages(3, 5))
    assert scene.cache.tier.statistics.skipped == 20
    assert scene.cache.host_accounts().evictable == 12


def test_what_the_host_evicts_of_what_is_there_alone_is_gone():
    scene, text = scene_on_host(host_pages=4)
    scene.publish(scene.pages(2, 4))
    kv = scene.open(text)
    assert (kv.prefix_len, scene.cache.load_back(kv, text)) == (0, 0)


def test_insert_through_host_only_edges_hands_the_slots_over_without_a_copy():
    scene, text = scene_on_host()
    kv = scene.open(text)
    compute(scene.cache, kv, text, len(text))
    own = scene.cache.slots(kv, 0, 12).tolist()
    scene.cache.checkpoint(kv, text)
    assert scene.cache.slots(kv, 0, 12).tolist() == own
    assert (kv.cache_inserted_len, kv.cache_protected_len) == (12, 12)
    assert scene.cache.copies_in_flight == 0, "the host has it already"


# --- views ---------------------------------------------------------------------------------------


@every_page_size
def test_events_speak_of_all_tiers(page_size):
    scene = Scene(page_size, host_pages=8)
    block = event_block_tokens(page_size)
    text = scene.pages(1, 8 if page_size < 16 else 4, tail=0)
    hashes = tuple(prompt_block_hashes(text, block, SHARED))
    scene.on_host(text)
    assert scene.cache.take_events() == ([BlocksStored(hashes)] if hashes else [])
    assert scene.cache.tree.digests_to_come(text, SHARED) == b"", "the host holds it"
    kv = scene.open(text)
    scene.cache.load_back(kv, text)
    scene.settle()
    scene.cache.release(kv, None)
    assert scene.cache.take_events() == []
    scene.push_out()
    scene.on_host(scene.pages(2, 8, tail=0))
    removed = [e for e in scene.cache.take_events() if isinstance(e, BlocksRemoved)]
    assert {block for event in removed for block in event.block_hashes} == set(hashes)


def test_report_and_drop_cover_both_tiers():
    scene, text = scene_on_host()
    kv = scene.open(text)
    scene.cache.load_back(kv, text)
    assert "12 loading, of 32" in scene.cache.oom_report()
    assert "host slots: 116 free, 0 evictable, 12 protected" in scene.cache.oom_report()
    with pytest.raises(OutOfSlots, match="host slots: 116 free"):
        scene.cache.extend(scene.open(tokens_of([1]), "b"), 4 * 8)
    scene.settle()
    for live in scene.cache.live_requests():
        scene.cache.release(live, None)
    scene.cache.drop_cache()
    assert scene.cache.host_accounts().free == 32 * 4
    assert scene.cache.accounts().free == scene.cache.num_slots
    scene.cache.close()
    assert scene.copier.is_closed


def test_cache_is_not_dropped_while_it_is_copied():
    scene = Scene()
    text = scene.pages(1, 3)
    kv = scene.open(text)
    compute(scene.cache, kv, text, len(text))
    scene.cache.release(kv, text)
    with pytest.raises(AssertionError, match="while it is copied"):
        scene.cache.drop_cache()


def test_the_engine_is_woken_when_a_copy_is_done():
    scene, text = scene_on_host()
    woken = []
    scene.cache.on_copy_done = lambda: woken.append(True)
    scene.cache.load_back(scene.open(text), text)
    assert woken == []
    scene.copier.run()
    assert woken == [True]


@every_policy
@every_page_size
def test_a_cyclic_working_set_of_four_device_pools_hits_like_an_infinite_cache(
    page_size, write_policy
):
    scene = Scene(page_size, host_pages=48, write_policy=write_policy)
    infinite = tiny_cache(page_size, pages=64, auditing=False)
    texts = [scene.pages(number, 3) for number in range(11)]
    hits = {"tiered": 0, "infinite": 0}
    for _ in range(4):
        for text in texts:
            kv = scene.open(text)
            if scene.cache.load_back(kv, text):
                assert scene.settle() == [kv]
            hits["tiered"] += kv.prefix_len
            assert_reads_its_tokens(scene.cache, kv, text)
            compute(scene.cache, kv, text, len(text))
            scene.cache.release(kv, text)
            if write_policy is WritePolicy.WRITE_THROUGH_SELECTIVE and hits["infinite"] == 0:
                # What was never hit is not worth a copy: give it its hits while it is there.
                for name in "xy":
                    scene.cache.release(scene.open(text, name), None)
            scene.settle()
            other = infinite.open("a", text, SHARED)
            hits["infinite"] += other.prefix_len
            compute(infinite, other, text, len(text))
            infinite.release(other, text)
    assert hits["infinite"] == 3 * 11 * 3 * page_size
    assert hits["tiered"] == hits["infinite"]


@pytest.mark.parametrize("with_files", [False, True])
@every_policy
def test_threads_that_copy_while_the_engine_goes_on(write_policy, with_files, tmp_path):
    """Nothing here waits for a copy but whoever wants what it brings."""
    files = (tmp_path, ThreadCopier()) if with_files else None
    # The working set fits the lowest tier.
    cache = tiered_cache(
        4,
        ThreadCopier(),
        host_pages=20 if with_files else 40,
        write_policy=write_policy,
        auditing=False,
        files=files,
    )
    woken = threading.Event()
    cache.on_copy_done = woken.set
    texts = [tokens_of(range(1000 * number, 1000 * number + 13)) for number in range(11)]
    hits = 0
    for number in range(60):
        # Each text three times in a row: hit twice while it is on the device.
        text = texts[number // 3 * 7 % 11]
        kv = cache.open("a", text, SHARED)
        cache.load_back(kv, text)
        while kv.loading_len:
            assert woken.wait(60), "a copy does not end"
            woken.clear()
            cache.poll()
        hits += kv.prefix_len
        assert_reads_its_tokens(cache, kv, text)
        compute(cache, kv, text, len(text))
        cache.release(kv, text)
        free = cache.allocator.free_slots()
        write_stamps(cache, free, np.full((len(free), 2), -1.0, dtype=np.float32))
        cache.audit()
    while cache.copies_in_flight:
        woken.wait(0.01)
        cache.poll()
    cache.audit()
    assert cache.accounts().is_idle
    assert cache.tier.statistics.failed == 0
    if with_files:
        # A page may be asked for before it is in its file.
        assert hits > 40 * 12, "no more than the device alone would hit"
    else:
        assert hits == (60 - 11) * 12
    cache.close()
