"""What a handoff took note of stays in place, whatever is published meanwhile."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.config import EvictionPolicy
from mem_cache.slot_allocator import TokenToKVPoolAllocator
from mem_cache.tiered_radix_cache import TieredRadixCache
from tests.support.kv_caches import (
    PAGE_SIZES,
    SHARED,
    assert_reads_its_tokens,
    compute,
    tiny_cache,
    tokens_of,
)

every_page_size = pytest.mark.parametrize("page_size", PAGE_SIZES)
every_index = pytest.mark.parametrize("window_pages", [None, 9], ids=["radix", "window"])


def _cache(page_size, window_pages, **options):
    window = None if window_pages is None else window_pages * page_size
    return tiny_cache(page_size, window=window, **options)


def _computed(cache, name, text, *, pinned=False):
    kv = cache.open(name, text, SHARED)
    compute(cache, kv, text, len(text))
    if pinned:
        cache.pin(kv)
    return kv


@every_page_size
@every_index
def test_duplicates_of_a_pinned_row_stay_until_it_is_unpinned(page_size, window_pages):
    cache = _cache(page_size, window_pages)
    text = tokens_of(range(2 * page_size + 1))
    first = _computed(cache, "first", text)
    second = cache.open("second", text, SHARED)
    compute(cache, second, text, len(text))
    cache.pin(second)
    noted = cache.slots(second, 0, len(text)).tolist()
    cache.checkpoint(first, text)
    before = cache.accounts()
    cache.checkpoint(second, text)
    assert cache.accounts() == before
    assert cache.slots(second, 0, len(text)).tolist() == noted
    assert second.cache_protected_len == 0
    assert not set(noted) & set(cache.allocator.free_slots().tolist())
    assert_reads_its_tokens(cache, second, text)
    cache.unpin(second)
    cache.checkpoint(second, text)
    published = cache.layout.round_down(len(text))
    assert second.cache_protected_len == published
    assert set(noted[:published]) <= set(cache.allocator.free_slots().tolist())
    assert_reads_its_tokens(cache, second, text)


@every_page_size
@every_index
def test_a_pinned_row_publishes_what_nobody_has(page_size, window_pages):
    cache = _cache(page_size, window_pages)
    text = tokens_of(range(3 * page_size))
    kv = _computed(cache, "a", text[: 2 * page_size])
    cache.checkpoint(kv, text[:page_size])
    cache.pin(kv)
    noted = cache.slots(kv, 0, 2 * page_size).tolist()
    compute(cache, kv, text, len(text))
    cache.checkpoint(kv, text)
    assert kv.cache_protected_len == 3 * page_size
    assert cache.slots(kv, 0, 2 * page_size).tolist() == noted
    assert cache.open("b", tokens_of(range(3 * page_size + 1)), SHARED).prefix_len == 3 * page_size


@every_page_size
@every_index
def test_new_pages_behind_duplicates_wait_too(page_size, window_pages):
    """They could only be published behind slots that the pinned row does not read."""
    cache = _cache(page_size, window_pages)
    text = tokens_of(range(3 * page_size))
    kv = _computed(cache, "a", text, pinned=True)
    cache.release(_computed(cache, "b", text[:page_size]), text[:page_size])
    cache.checkpoint(kv, text)
    assert (kv.cache_protected_len, cache.accounts().evictable) == (0, page_size)
    cache.unpin(kv)
    cache.release(kv, text)
    assert cache.accounts().evictable == 3 * page_size


@every_page_size
def test_a_pinned_prompt_needs_no_more_than_its_own_slots(page_size):
    """Else it would wait for slots that only its own end could give back."""
    cache = tiny_cache(page_size, pages=4)
    text = tokens_of(range(4 * page_size))
    kv = cache.open("a", text, SHARED)
    cache.release(_computed(cache, "b", text[: 3 * page_size]), text[: 3 * page_size])
    cache.pin(kv)
    for length in range(page_size, len(text) + 1, page_size):
        compute(cache, kv, text, length)
        cache.checkpoint(kv, text[:length])
    assert_reads_its_tokens(cache, kv, text)
    cache.unpin(kv)
    cache.release(kv, text)
    assert cache.accounts().evictable == 4 * page_size


@every_page_size
def test_two_handoffs_pin_one_row(page_size):
    cache = tiny_cache(page_size)
    text = tokens_of(range(2 * page_size))
    kv = _computed(cache, "a", text, pinned=True)
    cache.pin(kv)
    cache.release(_computed(cache, "b", text), text)
    cache.unpin(kv)
    cache.checkpoint(kv, text)
    assert kv.cache_protected_len == 0
    cache.unpin(kv)
    cache.checkpoint(kv, text)
    assert kv.cache_protected_len == 2 * page_size


def test_an_edge_on_the_host_alone_makes_no_duplicates():
    tree = TieredRadixCache(1, 16, EvictionPolicy.LRU, TokenToKVPoolAllocator(10))
    text = tokens_of([1, 2, 3])
    node = tree.insert(text, np.arange(3), SHARED).last_node
    assert tree.insert(text, np.arange(3, 6), SHARED, keeps_own=True).last_node is tree.root
    host_slots = tree.take_host_slots(3)
    assert host_slots is not None
    tree.keep(node, host_slots)
    assert tree.evict(3).tolist() == [0, 1, 2]
    result = tree.insert(text, np.arange(6, 9), SHARED, keeps_own=True)
    assert (result.last_node, len(result.duplicates)) == (node, 0)
    assert node.value.tolist() == [6, 7, 8]
