from dataclasses import replace

import pytest

from kvferry.config import CacheConfig, HostTierConfig
from kvferry.errors import ConfigError
from mem_cache.chunk_cache import ChunkCache
from mem_cache.errors import LedgerError
from mem_cache.factory import assemble_kv_cache
from mem_cache.radix_cache import RadixCache
from mem_cache.window_radix_cache import WindowRadixCache
from tests.support.kv_caches import (
    PAGE_SIZES,
    SHARED,
    compute,
    read_stamps,
    stamps,
    tiny_cache,
    tiny_layout,
    tokens_of,
)

every_page_size = pytest.mark.parametrize("page_size", PAGE_SIZES)


def window_cache(page_size, *, window_pages=2, pages=12, **options):
    """A cache whose window needs `window_pages` whole pages."""
    return tiny_cache(page_size, pages=pages, window=window_pages * page_size + 1, **options)


def text_of(pages, page_size, start=0):
    return tokens_of(start + n // page_size for n in range(pages * page_size))


def serve(cache, text, chunk):
    """Compute and publish a prompt in chunks."""
    kv = cache.open("served", text, SHARED)
    while kv.committed_len < len(text):
        compute(cache, kv, text, min(len(text), kv.committed_len + chunk))
        cache.checkpoint(kv, text[: kv.committed_len])
    cache.release(kv, text)


def assert_window_is_read(cache, kv, text):
    start = cache.window.needed_from(kv.committed_len)
    seen = read_stamps(cache, cache.slots(kv, start, kv.committed_len))
    expected = stamps(text[: kv.committed_len], kv.extra_key)[start:]
    assert (seen[:, 0] == expected).all()
    assert (seen[:, 1] == -expected).all()


@every_page_size
def test_a_long_decode_fits_into_a_pool_of_little_more_than_its_window(page_size):
    # The window's pages, the one it grows into and the one it leaves.
    cache = window_cache(page_size, pages=4, radix=False)
    text = text_of(15, page_size)
    kv = cache.open("long", text[:1], SHARED)
    for length in range(1, len(text) + 1):
        compute(cache, kv, text, length)
        assert kv.private_len <= 4 * page_size
        assert_window_is_read(cache, kv, text)
    assert kv.allocated_len == 15 * page_size
    cache.release(kv, text)
    assert cache.accounts().free == 4 * page_size


@every_page_size
def test_what_left_the_window_can_be_evicted_while_the_request_lives(page_size):
    cache = window_cache(page_size)
    text = text_of(8, page_size)
    kv = cache.open("a", text, SHARED)
    for length in range(page_size, len(text) + 1, page_size):
        compute(cache, kv, text, length)
        cache.checkpoint(kv, text[:length])
    accounts = cache.accounts()
    # Published by the last checkpoint, and all of the window before it.
    assert (accounts.protected, accounts.evictable) == (3 * page_size, 5 * page_size)
    other = cache.open("b", text_of(9, page_size, 50), SHARED)
    cache.extend(other, 9 * page_size)
    assert cache.accounts().evictable == 0
    assert_window_is_read(cache, kv, text)
    cache.release(kv, text)
    cache.release(other, None)


@every_page_size
def test_a_prompt_longer_than_the_pool_is_served_in_chunks_and_hit_at_its_end(page_size):
    cache = window_cache(page_size, pages=6)
    text = text_of(15, page_size)
    serve(cache, text, chunk=page_size)
    again = cache.open("again", text, SHARED)
    assert again.prefix_len == 14 * page_size
    assert again.window_start == 12 * page_size
    assert_window_is_read(cache, again, text)
    cache.release(again, None)
    # Its beginning is gone: nothing to start from.
    short = cache.open("short", text[: 3 * page_size], SHARED)
    assert short.prefix_len == 0
    cache.release(short, None)


@every_page_size
def test_a_hit_locks_its_window_only(page_size):
    cache = window_cache(page_size)
    text = text_of(8, page_size)
    serve(cache, text, chunk=len(text))
    kv = cache.open("hit", text, SHARED)
    assert kv.prefix_len == 7 * page_size
    assert cache.accounts().protected == 2 * page_size
    cache.release(kv, None)


@every_page_size
def test_a_request_that_left_all_it_published_behind_publishes_again(page_size):
    cache = window_cache(page_size)
    text = text_of(12, page_size)
    kv = cache.open("a", text, SHARED)
    compute(cache, kv, text, 2 * page_size)
    cache.checkpoint(kv, text[: 2 * page_size])
    for length in range(2 * page_size, 9 * page_size + 1):
        compute(cache, kv, text, length)
    assert kv.last_node is cache.tree.root
    assert kv.cache_protected_len == kv.window_start > 2 * page_size
    # What it had published is nobody's business now.
    cache.allocator.free(cache.tree.evict(2 * page_size))
    assert not list(cache.tree.nodes())
    cache.checkpoint(kv, text[: 9 * page_size])
    assert kv.cache_protected_len == 9 * page_size
    cache.release(kv, text)
    again = cache.open("b", text, SHARED)
    assert again.prefix_len == 9 * page_size
    cache.release(again, None)


@every_page_size
def test_a_pinned_row_keeps_what_the_handoff_reads(page_size):
    cache = window_cache(page_size)
    text = text_of(6, page_size)
    kv = cache.open("a", text, SHARED)
    cache.pin(kv)
    for length in range(page_size, len(text) + 1, page_size):
        compute(cache, kv, text, length)
        cache.checkpoint(kv, text[:length])
    assert kv.window_start == 0
    assert len(cache.slots(kv, 0, len(text))) == len(text)
    cache.unpin(kv)
    cache.extend(kv, len(text))
    assert kv.window_start == 4 * page_size
    with pytest.raises(AssertionError, match="has no slots"):
        cache.slots(kv, 0, len(text))
    cache.release(kv, text)


@every_page_size
def test_the_ledger_sees_a_row_that_reads_left_of_its_window(page_size):
    cache = window_cache(page_size)
    text = text_of(8, page_size)
    serve(cache, text, chunk=len(text))
    kv = cache.open("hit", text, SHARED)
    assert kv.req_pool_idx is not None
    cache.rows.write(kv.req_pool_idx, 0, tokens_of([page_size]))
    with pytest.raises(LedgerError, match=r"check 3: .* left of its window"):
        cache.audit()


@every_page_size
def test_the_ledger_sees_a_tombstone_where_there_is_no_window(page_size):
    cache = tiny_cache(page_size, pages=12)
    text = text_of(4, page_size)
    serve(cache, text, chunk=2 * page_size)
    node = next(cache.tree.nodes())
    assert node.children
    cache.allocator.free(node.value)
    node.value = node.value[:0]
    with pytest.raises(LedgerError, match="check 2"):
        cache.audit()


def test_a_window_that_is_never_left_is_none():
    window = {"context_length": 64, "radix": True}
    assert type(tiny_cache(4, window=63, **window).tree) is WindowRadixCache
    assert type(tiny_cache(4, window=64, **window).tree) is RadixCache
    assert type(tiny_cache(4, window=None, **window).tree) is RadixCache
    chunks = tiny_cache(4, window=8, radix=False)
    assert type(chunks.tree) is ChunkCache
    assert chunks.window.tokens == 8


def test_a_window_and_a_host_tier_are_refused_together():
    config = replace(CacheConfig(page_size=4, rows=2), host=HostTierConfig(memory_bytes=2**20))
    with pytest.raises(ConfigError, match="sliding window") as refused:
        assemble_kv_cache(tiny_layout(4), config, 64, context_length=64, window=8)
    assert refused.value.field == "cache.host.memory_bytes"
