"""Two requests that share a page, from their admission to the eviction of what they left."""

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


def test_two_requests_share_a_page_of_four():
    """A = [10,11,12,13,20,21] and B = [10,11,12,13,30] at page size 4."""
    cache = tiny_cache(4, pages=3)
    tokens_a = tokens_of([10, 11, 12, 13, 20, 21])
    tokens_b = tokens_of([10, 11, 12, 13, 30])

    a = cache.open("A", tokens_a, SHARED)
    assert (a.prefix_len, a.cache_protected_len) == (0, 0)
    compute(cache, a, tokens_a, 4)
    page = cache.slots(a, 0, 4).tolist()
    cache.checkpoint(a, tokens_a[:4])
    assert a.cache_protected_len == 4
    compute(cache, a, tokens_a, 6)
    accounts = cache.accounts()
    assert (accounts.protected, accounts.private, accounts.free) == (4, 4, 4)

    b = cache.open("B", tokens_b, SHARED)
    assert b.prefix_len == 4
    assert b.req_pool_idx != a.req_pool_idx
    assert cache.slots(b, 0, 4).tolist() == page
    assert b.last_node is a.last_node
    assert a.last_node.lock_ref == 2
    compute(cache, b, tokens_b, 5)
    assert_reads_its_tokens(cache, a, tokens_a)
    assert_reads_its_tokens(cache, b, tokens_b)
    node = b.last_node

    cache.release(a, tokens_a)
    assert node.lock_ref == 1
    assert node.value.tolist() == page
    accounts = cache.accounts()
    assert (accounts.protected, accounts.private, accounts.free) == (4, 4, 4)

    cache.release(b, tokens_b)
    accounts = cache.accounts()
    assert (accounts.evictable, accounts.protected, accounts.free) == (4, 0, 8)

    c = cache.open("C", tokens_of(range(50, 62)), SHARED)
    cache.extend(c, 8)
    assert cache.accounts().evictable == 4
    cache.extend(c, 12)
    assert cache.slots(c, 8, 12).tolist() == page
    assert cache.accounts().evictable == 0
    cache.release(c, None)
    assert cache.accounts().is_idle


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_two_requests_share_a_page_of_any_size(page_size):
    """The same course, with one full shared page and a rest of its own for each request."""
    cache = tiny_cache(page_size, pages=4)
    shared = list(range(page_size))
    own = max(1, page_size // 2)
    tokens_a = tokens_of(shared + [1000] * own)
    tokens_b = tokens_of([*shared, 2000])

    a = cache.open("A", tokens_a, SHARED)
    compute(cache, a, tokens_a, page_size)
    cache.checkpoint(a, tokens_a[:page_size])
    compute(cache, a, tokens_a, page_size + own)
    b = cache.open("B", tokens_b, SHARED)
    assert b.prefix_len == page_size
    compute(cache, b, tokens_b, page_size + 1)
    assert a.last_node.lock_ref == 2
    assert_reads_its_tokens(cache, a, tokens_a)
    assert_reads_its_tokens(cache, b, tokens_b)

    free = cache.accounts().free
    cache.release(a, tokens_a)
    # A rest that is a full page (only at page size 1) is published, any other is freed.
    kept = own // page_size * page_size
    assert cache.accounts().evictable == kept
    assert cache.accounts().free == free + page_size - kept
    cache.release(b, None)
    assert cache.accounts().evictable == page_size + kept
    assert cache.accounts().is_idle
