"""The host tier as requests see it: what is evicted lives on, and comes back before it counts."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvferry.cache_key import Sharing
from kvferry.config import WritePolicy
from kvferry.ids import ExtraKey
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
from tests.support.manual_copier import ManualCopier

every_page_size = pytest.mark.parametrize("page_size", PAGE_SIZES)
every_policy = pytest.mark.parametrize("write_policy", WritePolicy)


class Scene:
    """A device pool of 8 pages over a host pool of 32, and a copier that the test drives."""

    def __init__(self, page_size=4, **options):
        self.copier = ManualCopier()
        self.cache = tiered_cache(page_size, self.copier, **options)
        self.size = page_size

    def pages(self, first, count, tail=1):
        """`count` pages of tokens that no other first page has, and a few of a partial page."""
        return tokens_of(range(1000 * first, 1000 * first + count * self.size + tail))

    def publish(self, text):
        kv = self.cache.open("publisher", text, SHARED)
        compute(self.cache, kv, text, len(text))
        self.cache.release(kv, text)
        self.settle()

    def settle(self):
        self.copier.run_all()
        return self.cache.poll()

    def push_out(self):
        """Take every slot of the device for a moment."""
        kv = self.cache.open("big", tokens_of([7]), ExtraKey("big"))
        self.cache.extend(kv, 8 * self.size)
        slots = self.cache.slots(kv, 0, 8 * self.size)
        write_stamps(self.cache, slots, np.full((len(slots), 2), -1.0, dtype=np.float32))
        self.cache.release(kv, None)

    def on_host(self, text):
        """Have a text on the host only."""
        self.publish(text)
        self.push_out()
        assert self.cache.accounts().free == self.cache.num_slots

    def open(self, text, name="a"):
        return self.cache.open(name, text, SHARED)


def scene_on_host(page_size=4, pages=3, **options):
    scene = Scene(page_size, **options)
    text = scene.pages(1, pages)
    scene.on_host(text)
    return scene, text


# --- coming back ---------------------------------------------------------------------------------


@every_page_size
def test_what_was_evicted_comes_back_and_reads_as_before(page_size):
    scene, text = scene_on_host(page_size)
    cache = scene.cache
    kv = scene.open(text)
    assert kv.prefix_len == 0, "a host hit is no device hit"
    assert cache.load_back(kv, text) == 3 * page_size
    assert (kv.loading_len, kv.prefix_len, kv.committed_len) == (3 * page_size, 0, 0)
    assert cache.accounts().loading == 3 * page_size
    assert cache.copies_in_flight == 1
    assert cache.poll() == []
    scene.copier.run()
    assert cache.poll() == [kv]
    lengths = (kv.prefix_len, kv.cache_protected_len, kv.committed_len, kv.allocated_len)
    assert lengths == (3 * page_size,) * 4
    assert (kv.loading_len, kv.host_hit_len) == (0, 3 * page_size)
    assert_reads_its_tokens(cache, kv, text)
    compute(cache, kv, text, len(text))
    cache.release(kv, text)
    assert cache.accounts().is_idle
    assert scene.open(text, "b").prefix_len == 3 * page_size


def test_at_most_all_but_the_last_token_comes_back():
    scene = Scene()
    text = scene.pages(1, 3, tail=0)
    scene.on_host(text)
    kv = scene.open(text)
    assert scene.cache.load_back(kv, text) == 8


def test_part_of_a_path_on_the_device_and_the_rest_on_the_host():
    scene, text = scene_on_host(pages=3)
    first = scene.open(text[:9])
    scene.cache.load_back(first, text[:9])
    scene.settle()
    kv = scene.open(text, "b")
    assert kv.prefix_len == 8
    assert scene.cache.load_back(kv, text) == 4
    assert scene.settle() == [kv]
    assert (kv.prefix_len, kv.host_hit_len) == (12, 4)
    assert_reads_its_tokens(scene.cache, kv, text)


def test_while_it_comes_the_request_can_only_be_released():
    scene, text = scene_on_host()
    kv = scene.open(text)
    scene.cache.load_back(kv, text)
    for use in (
        lambda: scene.cache.extend(kv, len(text)),
        lambda: scene.cache.commit(kv, 0),
        lambda: scene.cache.checkpoint(kv, text[:0]),
        lambda: scene.cache.pin(kv),
        lambda: scene.cache.load_back(kv, text),
    ):
        with pytest.raises(AssertionError, match="being loaded"):
            use()
    scene.cache.release(kv, text)
    assert scene.cache.accounts().is_idle


@pytest.mark.parametrize("begun", [False, True])
def test_a_load_that_nobody_waits_for_gives_everything_back(begun):
    scene, text = scene_on_host()
    kv = scene.open(text)
    scene.cache.load_back(kv, text)
    if begun:
        scene.copier.run()
    scene.cache.release(kv, None)
    assert scene.cache.accounts().free == scene.cache.num_slots
    assert scene.cache.copies_in_flight == 0
    assert scene.cache.poll() == []
    again = scene.open(text)
    assert scene.cache.load_back(again, text) == 12, "the host still has it"


def test_a_second_request_joins_the_load_of_the_first():
    scene, text = scene_on_host()
    a, b = scene.open(text), scene.open(text, "b")
    assert scene.cache.load_back(a, text) == scene.cache.load_back(b, text) == 12
    assert (scene.cache.copies_in_flight, scene.cache.accounts().loading) == (1, 12)
    scene.cache.release(a, None)
    assert scene.settle() == [b]
    assert_reads_its_tokens(scene.cache, b, text)
    scene.cache.release(b, None)
    assert scene.cache.accounts().evictable == 12


def test_who_joins_a_load_and_wants_more_waits_for_the_rest_too():
    scene = Scene()
    short = scene.pages(1, 2)
    longer = tokens_of([*short[:8], *range(50, 59)])
    scene.publish(short)
    scene.on_host(longer)
    a, b = scene.open(short), scene.open(longer, "b")
    assert scene.cache.load_back(a, short) == 8
    assert scene.cache.load_back(b, longer) == 8
    scene.copier.run()
    assert scene.cache.poll() == [a]
    assert (b.prefix_len, b.loading_len) == (8, 8)
    assert scene.settle() == [b]
    assert (b.prefix_len, b.host_hit_len) == (16, 16)
    assert_reads_its_tokens(scene.cache, b, longer)


def test_a_load_is_held_by_all_who_wait_for_it_and_counted_once():
    scene, text = scene_on_host()
    a, b = scene.open(text), scene.open(text[:9], "b")
    scene.cache.load_back(a, text)
    scene.cache.load_back(b, text[:9])
    assert (a.loading_slots, b.loading_slots) == (12, 8)
    for waiting in ([a], [b], [a, b]):
        coming = sum(kv.loading_len for kv in waiting)
        assert coming + scene.cache.held_slots(waiting) == max(12, coming)
    scene.settle()
    assert (a.loading_slots, scene.cache.held_slots([a]), scene.cache.held_slots([b])) == (0, 12, 8)


def test_a_fork_inside_what_is_loading():
    """The second request wants half of an edge that is on its way: the edge is split."""
    scene, text = scene_on_host()
    fork = tokens_of([*text[:4], *range(90, 99)])
    a, b = scene.open(text), scene.open(fork, "b")
    scene.cache.load_back(a, text)
    assert scene.cache.load_back(b, fork) == 4
    assert sorted(kv.request_id for kv in scene.settle()) == ["a", "b"]
    assert (a.prefix_len, b.prefix_len) == (12, 4)
    assert_reads_its_tokens(scene.cache, a, text)
    assert_reads_its_tokens(scene.cache, b, fork)


def test_tokens_computed_by_another_meanwhile_are_not_filled_twice():
    scene, text = scene_on_host()
    kv, other = scene.open(text), scene.open(text, "other")
    scene.cache.load_back(kv, text)
    compute(scene.cache, other, text, 8)
    scene.cache.checkpoint(other, text[:8])
    assert scene.settle() == [kv]
    assert kv.prefix_len == 12
    assert scene.cache.slots(kv, 0, 8).tolist() == scene.cache.slots(other, 0, 8).tolist()
    assert_reads_its_tokens(scene.cache, kv, text)


def test_a_failed_load_leaves_the_request_to_compute():
    scene, text = scene_on_host()
    kv = scene.open(text)
    scene.cache.load_back(kv, text)
    scene.copier.run(error=OSError("the host's memory is gone"))
    assert scene.cache.poll() == [kv]
    assert (kv.prefix_len, kv.loading_len, kv.host_hit_len) == (0, 0, 0)
    assert scene.cache.accounts().free == scene.cache.num_slots
    assert scene.cache.tier.statistics.failed == 12
    compute(scene.cache, kv, text, len(text))
    assert_reads_its_tokens(scene.cache, kv, text)


def test_too_few_slots_load_what_fits_from_the_left():
    scene, text = scene_on_host(pages=6)
    other = scene.open(tokens_of([5]), "other")
    scene.cache.extend(other, 4 * 6)
    kv = scene.open(text)
    assert scene.cache.load_back(kv, text) == 8
    assert scene.settle() == [kv]
    assert (kv.prefix_len, kv.loading_len) == (8, 0)


def test_a_short_host_hit_is_computed():
    scene, text = scene_on_host()
    scene.cache.tier._load_tokens_min = 13
    assert scene.cache.load_back(scene.open(text), text) == 0
    scene.cache.tier._load_tokens_min = 12
    assert scene.cache.load_back(scene.open(text, "b"), text) == 12


def test_a_load_evicts_other_cache_but_never_the_path_it_loads_under():
    scene = Scene(host_pages=12)
    text, filler = scene.pages(1, 5), scene.pages(2, 5)
    scene.on_host(text)
    half = scene.open(text[:9])
    scene.cache.load_back(half, text[:9])
    scene.settle()
    scene.cache.release(half, None)
    scene.publish(filler)
    kv = scene.open(text)
    assert kv.prefix_len == 8
    assert scene.cache.load_back(kv, text) == 12
    assert scene.settle() == [kv]
    assert kv.prefix_len == 20
    assert_reads_its_tokens(scene.cache, kv, text)


def test_room_for_a_load_is_not_made_of_what_it_loads():
    """What leaves the device is written to a host that has no room but where the load reads."""
    scene = Scene(host_pages=8, write_policy=WritePolicy.WRITE_BACK)
    text, filler = scene.pages(1, 3), scene.pages(2, 8, tail=0)
    scene.on_host(text)
    scene.publish(filler)
    kv = scene.open(text)
    assert scene.cache.load_back(kv, text) == 12
    assert scene.cache.tier.statistics.skipped == 32
    assert scene.settle() == [kv]
    assert_reads_its_tokens(scene.cache, kv, text)


def test_the_host_makes_room_of_what_nobody_reads():
    """The least recently used text is being loaded: the next one goes."""
    scene = Scene(host_pages=8, write_policy=WritePolicy.WRITE_BACK)
    text, other, filler = scene.pages(1, 3), scene.pages(2, 3), scene.pages(3, 4, tail=0)
    scene.on_host(text)
    scene.on_host(other)
    scene.publish(filler)
    kv = scene.open(text)
    assert scene.cache.load_back(kv, text) == 12
    scene.cache.release(scene.open(other, "b"), None)
    scene.cache.extend(scene.open(scene.pages(4, 1), "c"), 8)
    assert scene.settle() == [kv]
    assert_reads_its_tokens(scene.cache, kv, text)
    assert scene.cache.load_back(scene.open(other, "d"), other) == 0


@pytest.mark.parametrize("how", ["inbound", Sharing.PRIVATE, Sharing.RECOMPUTED])
def test_who_does_not_match_does_not_load(how):
    scene, text = scene_on_host()
    if how == "inbound":
        kv = scene.cache.open("a", text, SHARED, inbound=True)
    else:
        kv = scene.cache.open("a", text, SHARED, sharing=how)
    assert scene.cache.load_back(kv, text) == 0


def test_one_tier_costs_nothing_and_loads_nothing():
    cache = tiny_cache(4)
    kv = cache.open("a", tokens_of(range(9)), SHARED)
    assert cache.load_back(kv, tokens_of(range(9))) == 0
    assert (cache.poll(), cache.copies_in_flight, cache.host_accounts()) == ([], 0, None)


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
            assert woken.wait(10), "a copy does not end"
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
