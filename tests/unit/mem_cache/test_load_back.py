"""What was evicted to the host comes back, and counts when it is there."""

from __future__ import annotations

import pytest

from kvferry.cache_key import Sharing
from kvferry.config import WritePolicy
from tests.support.kv_caches import (
    PAGE_SIZES,
    SHARED,
    assert_reads_its_tokens,
    compute,
    tiny_cache,
    tokens_of,
)
from tests.support.tier_scene import Scene, scene_on_host

every_page_size = pytest.mark.parametrize("page_size", PAGE_SIZES)
every_policy = pytest.mark.parametrize("write_policy", WritePolicy)


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
