"""Slots that were taken for tokens that did not come go back; what is computed stays."""

from __future__ import annotations

import pytest

from tests.support.kv_caches import (
    PAGE_SIZES,
    SHARED,
    assert_reads_its_tokens,
    compute,
    tiny_cache,
    tokens_of,
)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_whole_pages_without_anything_computed_come_free(page_size):
    cache = tiny_cache(page_size)
    text = tokens_of(range(page_size + 1))
    kv = cache.open("r", text, SHARED)
    compute(cache, kv, text, len(text))
    before = cache.accounts()
    cache.extend(kv, 3 * page_size + 1)
    assert cache.accounts().free == before.free - 2 * page_size
    cache.trim(kv)
    assert cache.accounts() == before
    assert kv.allocated_len == 2 * page_size
    assert_reads_its_tokens(cache, kv, text)
    cache.trim(kv)
    assert cache.accounts() == before
    cache.release(kv, text)
    assert cache.accounts().is_idle


def test_a_pinned_row_keeps_its_slots_until_its_end():
    cache = tiny_cache(4)
    text = tokens_of(range(5))
    kv = cache.open("r", text, SHARED)
    compute(cache, kv, text, len(text))
    cache.extend(kv, 12)
    cache.pin(kv)
    cache.trim(kv)
    assert kv.allocated_len == 12
    cache.unpin(kv)
    cache.release(kv, text)
    assert cache.accounts().is_idle


def test_slots_that_a_handoff_will_fill_are_not_given_back():
    cache = tiny_cache(4)
    kv = cache.open("r", tokens_of(range(9)), SHARED, inbound=True)
    cache.extend(kv, 9)
    with pytest.raises(AssertionError, match="handoff"):
        cache.trim(kv)
    cache.release(kv, None)
