"""Eight things that are easily believed of a KV cache and are wrong, each shown to be wrong."""

from __future__ import annotations

import numpy as np
import pytest

from mem_cache.errors import OutOfSlots
from mem_cache.tree_node import TreeNode
from tests.support.kv_caches import (
    PAGE_SIZES,
    SHARED,
    assert_reads_its_tokens,
    compute,
    read_stamps,
    tiny_cache,
    tokens_of,
)

pytestmark = pytest.mark.parametrize("page_size", PAGE_SIZES)


def _publish(cache, name, token_ids):
    """Serve a request of whole pages and leave its KV in the tree."""
    kv = cache.open(name, token_ids, SHARED)
    compute(cache, kv, token_ids, len(token_ids))
    cache.release(kv, token_ids)


def test_the_tree_holds_no_kv(page_size):
    """Nodes hold slot numbers; change the pool's bytes and the "cached" K/V is changed."""
    cache = tiny_cache(page_size)
    _publish(cache, "a", tokens_of(range(2 * page_size)))
    (node,) = cache.tree.nodes()
    assert node.value.dtype == np.int64
    assert node.value.shape == (2 * page_size,)
    held = {name: getattr(node, name) for name in TreeNode.__slots__}
    assert all(np.ndim(value) <= 1 for value in held.values() if isinstance(value, np.ndarray))
    cache.pool.buffer.fill_(7.0)
    hit = cache.open("b", tokens_of(range(2 * page_size + 1)), SHARED)
    seen = read_stamps(cache, cache.slots(hit, 0, hit.prefix_len))
    assert (seen == 7.0).all()


def test_matching_is_not_read_only(page_size):
    """A match splits edges and refreshes access times, which decides who is evicted."""
    cache = tiny_cache(page_size, pages=4)
    first, second = tokens_of(range(2 * page_size)), tokens_of(range(500, 500 + 2 * page_size))
    _publish(cache, "a", first)
    _publish(cache, "b", second)
    assert len(list(cache.tree.nodes())) == 2
    match = cache.tree.match_prefix(first[:page_size], SHARED)
    assert match.length == page_size
    assert len(list(cache.tree.nodes())) == 3
    kept = match.last_device_node
    kv = cache.open("c", tokens_of(range(900, 900 + 3 * page_size)), SHARED)
    cache.extend(kv, 3 * page_size)
    # 3 pages went: the untouched text and the part of the other that was not looked at.
    assert list(cache.tree.nodes()) == [kept]


def test_a_hit_takes_capacity(page_size):
    """Slots that were evictable are not while a request reads them."""
    cache = tiny_cache(page_size, pages=4)
    text = tokens_of(range(3 * page_size))
    _publish(cache, "a", text)
    supply = cache.free_or_evictable()
    hit = cache.open("b", tokens_of([*text, 9]), SHARED)
    assert hit.prefix_len == 3 * page_size
    assert cache.allocator.num_free == page_size
    assert cache.free_or_evictable() == supply - 3 * page_size
    other = cache.open("c", tokens_of(range(700, 700 + 2 * page_size)), SHARED)
    with pytest.raises(OutOfSlots):
        cache.extend(other, 2 * page_size)
    cache.release(hit, None)
    cache.extend(other, 2 * page_size)


def test_locks_go_to_the_root(page_size):
    """A request's lock protects every node above the one it matched."""
    cache = tiny_cache(page_size, pages=4)
    text = tokens_of(range(3 * page_size))
    for pages in (1, 2, 3):
        _publish(cache, f"{pages}", text[: pages * page_size])
    assert len(list(cache.tree.nodes())) == 3
    hit = cache.open("b", tokens_of([*text, 9]), SHARED)
    assert [node.lock_ref for node in cache.tree.nodes()] == [1, 1, 1]
    other = cache.open("c", tokens_of([9, 9]), SHARED)
    with pytest.raises(OutOfSlots):
        cache.extend(other, 1 + page_size)
    assert cache.slots(hit, 0, 3 * page_size).tolist() == [
        slot for node in cache.tree.nodes() for slot in node.value.tolist()
    ]
    cache.release(hit, None)
    assert cache.accounts().protected == 0


def test_checkpoint_copies_indices_not_kv(page_size):
    """The pool's bytes stay as they are, the tree's numbers survive reuse of the row."""
    cache = tiny_cache(page_size)
    text = tokens_of(range(2 * page_size))
    kv = cache.open("a", text, SHARED)
    compute(cache, kv, text, len(text))
    before = cache.pool.buffer.clone()
    slots = cache.slots(kv, 0, len(text))
    cache.checkpoint(kv, text)
    assert cache.pool.buffer.equal(before)
    (node,) = cache.tree.nodes()
    assert node.value.tolist() == slots.tolist()
    row = kv.req_pool_idx
    cache.rows.req_to_token[row].zero_()
    assert node.value.tolist() == slots.tolist()


def test_ending_a_request_does_not_free_everything(page_size):
    """Its row comes back, its published pages stay, and the next request hits them."""
    cache = tiny_cache(page_size)
    text = tokens_of(range(2 * page_size + 1))
    _publish(cache, "a", text)
    accounts = cache.accounts()
    assert accounts.rows_live == 0
    assert accounts.evictable == len(text) // page_size * page_size
    assert accounts.free == accounts.total - accounts.evictable
    hit = cache.open("b", text, SHARED)
    assert hit.prefix_len == 2 * page_size
    assert_reads_its_tokens(cache, hit, text)


def test_disabling_the_radix_cache_does_not_remove_the_interface(page_size):
    """The same calls, no sharing, and everything is given back at the end."""
    cache = tiny_cache(page_size, radix=False)
    text = tokens_of(range(3 * page_size))
    a = cache.open("a", text, SHARED)
    compute(cache, a, text, 2 * page_size)
    cache.checkpoint(a, text[: 2 * page_size])
    compute(cache, a, text, 3 * page_size)
    b = cache.open("b", text, SHARED)
    assert b.prefix_len == 0
    compute(cache, b, text, len(text))
    assert not set(cache.slots(a, 0, len(text))) & set(cache.slots(b, 0, len(text)))
    assert_reads_its_tokens(cache, a, text)
    assert_reads_its_tokens(cache, b, text)
    assert (cache.take_events(), cache.snapshot_blocks()) == ([], ())
    cache.release(a, text)
    cache.release(b, text)
    assert cache.accounts().free == cache.num_slots


def test_page_size_is_not_only_a_performance_parameter(page_size):
    """It decides how much matches, is published, is freed, and is protected."""
    cache = tiny_cache(page_size, pages=256)
    text = tokens_of(range(130))
    kv = cache.open("a", text, SHARED)
    compute(cache, kv, text, 130)
    cache.checkpoint(kv, text)
    whole = 130 // page_size * page_size
    assert kv.cache_protected_len == whole
    assert kv.allocated_len == -(-130 // page_size) * page_size
    cache.release(kv, text)
    assert cache.accounts().evictable == whole
    hit = cache.open("b", text[:129], SHARED)
    assert hit.prefix_len == 128
    assert cache.open("c", text[:128], SHARED).prefix_len == 127 // page_size * page_size
