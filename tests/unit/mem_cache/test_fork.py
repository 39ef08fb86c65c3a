"""Samples of one prompt: whole pages are shared, the rest is copied, and each goes its own way."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.cache_key import Sharing
from mem_cache.errors import OutOfRows, OutOfSlots
from tests.support.kv_caches import (
    PAGE_SIZES,
    SHARED,
    assert_reads_its_tokens,
    compute,
    read_stamps,
    stamps,
    tiny_cache,
    tokens_of,
)

every_page_size = pytest.mark.parametrize("page_size", PAGE_SIZES)
radix_or_not = pytest.mark.parametrize("radix", [True, False], ids=["radix", "chunk"])


def _parent(cache, text, sharing=Sharing.SHARED):
    kv = cache.open("parent", text, SHARED, sharing=sharing)
    compute(cache, kv, text, len(text))
    cache.checkpoint(kv, text)
    return kv


def _and_then(text, token):
    return np.append(text, np.int32(token))


@every_page_size
@radix_or_not
@pytest.mark.parametrize("rest", [0, 1])
def test_samples_read_the_prompt_and_write_apart(page_size, radix, rest):
    cache = tiny_cache(page_size, radix=radix)
    text = tokens_of(range(2 * page_size + rest))
    parent = _parent(cache, text)
    twins = [cache.fork(parent, f"sample {number}") for number in range(1, 4)]
    everyone = [parent, *twins]
    for number, kv in enumerate(everyone):
        assert_reads_its_tokens(cache, kv, text)
        compute(cache, kv, _and_then(text, 900 + number), len(text) + 1)
    for number, kv in enumerate(everyone):
        longer = _and_then(text, 900 + number)
        assert_reads_its_tokens(cache, kv, longer)
        cache.release(kv, longer)
    assert cache.accounts().is_idle


@every_page_size
def test_only_the_last_page_is_copied(page_size):
    cache = tiny_cache(page_size)
    text = tokens_of(range(2 * page_size + 1))
    parent = _parent(cache, text)
    before = cache.accounts()
    twin = cache.fork(parent, "twin")
    shared = cache.slots(parent, 0, parent.cache_protected_len)
    assert cache.slots(twin, 0, twin.cache_protected_len).tolist() == shared.tolist()
    own = cache.slots(twin, twin.cache_protected_len, twin.allocated_len)
    copied = (2 * page_size + 1) % page_size
    assert len(own) == (page_size if copied else 0)
    accounts = cache.accounts()
    assert accounts.protected == before.protected
    assert accounts.private == before.private + len(own)
    assert accounts.rows_live == 2


@every_page_size
@pytest.mark.parametrize(("radix", "sharing"), [(False, Sharing.SHARED), (True, Sharing.PRIVATE)])
def test_what_is_not_in_the_index_is_copied(page_size, radix, sharing):
    cache = tiny_cache(page_size, radix=radix)
    text = tokens_of(range(2 * page_size + 1))
    parent = _parent(cache, text, sharing)
    twin = cache.fork(parent, "twin")
    length = len(text)
    assert (twin.cache_protected_len, twin.committed_len) == (0, length)
    assert not set(cache.slots(twin, 0, length)) & set(cache.slots(parent, 0, length))
    assert_reads_its_tokens(cache, twin, text)
    assert twin.sharing is sharing
    assert cache.accounts().private == 2 * parent.allocated_len


@every_page_size
def test_a_sample_outlives_the_one_it_came_from(page_size):
    """It has a lock of its own: pressure cannot take what it reads."""
    cache = tiny_cache(page_size, pages=5)
    text = tokens_of(range(2 * page_size + page_size // 2))
    parent = _parent(cache, text)
    twin = cache.fork(parent, "twin")
    cache.release(parent, text)
    other = cache.open("other", tokens_of([7]), SHARED)
    with pytest.raises(OutOfSlots):
        cache.extend(other, 4 * page_size)
    assert_reads_its_tokens(cache, twin, text)
    cache.release(twin, text)
    cache.extend(other, 4 * page_size)


@every_page_size
def test_the_tail_that_is_not_computed_is_not_copied(page_size):
    cache = tiny_cache(page_size)
    text = tokens_of(range(page_size + 1))
    parent = _parent(cache, text)
    cache.extend(parent, 4 * page_size)
    twin = cache.fork(parent, "twin")
    assert twin.allocated_len == cache.layout.round_up(len(text))
    assert twin.committed_len == len(text)


def test_a_sample_of_an_extra_key_keeps_it_and_its_priority():
    cache = tiny_cache(4)
    text = tokens_of(range(9))
    kv = cache.open("a", text, "adapter", priority=3)
    compute(cache, kv, text, 9)
    twin = cache.fork(kv, "b")
    assert (twin.extra_key, twin.priority, twin.request_id) == ("adapter", 3, "b")
    assert (twin.pins, twin.inbound, twin.cache_inserted_len) == (0, False, 0)


@radix_or_not
def test_without_a_row_or_slots_nothing_changes(radix):
    cache = tiny_cache(4, pages=4, rows=2, radix=radix)
    text = tokens_of(range(7))
    parent = _parent(cache, text)
    other = cache.open("other", tokens_of([9]), SHARED)
    before = cache.accounts()
    with pytest.raises(OutOfRows, match="rows: 0 free"):
        cache.fork(parent, "twin")
    assert cache.accounts() == before
    cache.release(other, None)
    cache.extend(parent, 16)
    before = cache.accounts()
    assert before.free == 0
    with pytest.raises(OutOfSlots, match="4 KV slots needed" if radix else "8 KV slots needed"):
        cache.fork(parent, "twin")
    assert cache.accounts() == before
    cache.audit()


def test_a_fork_evicts_what_nobody_reads():
    cache = tiny_cache(4, pages=4)
    old = tokens_of(range(100, 108))
    cache.release(_parent(cache, old), old)
    text = tokens_of(range(7))
    parent = _parent(cache, text)
    assert cache.accounts().free == 0
    twin = cache.fork(parent, "twin")
    assert_reads_its_tokens(cache, twin, text)


def test_a_handoff_under_way_is_not_forked():
    cache = tiny_cache(4)
    kv = cache.open("a", tokens_of(range(9)), SHARED, inbound=True)
    with pytest.raises(AssertionError, match="inbound KV cannot be read"):
        cache.fork(kv, "b")


@every_page_size
@pytest.mark.parametrize("published", [True, False])
def test_samples_share_what_is_left_of_a_window(page_size, published):
    """What the parent has given up the sample never had."""
    cache = tiny_cache(page_size, pages=24, window=2 * page_size + 1)
    text = tokens_of(range(6 * page_size + page_size // 2))
    parent = cache.open("parent", text, SHARED)
    for length in range(page_size, len(text) + 1, page_size):
        compute(cache, parent, text, length)
    compute(cache, parent, text, len(text))
    if published:
        cache.checkpoint(parent, text)
    twin = cache.fork(parent, "twin")
    assert twin.window_start == parent.window_start > 0
    for number, kv in enumerate((parent, twin)):
        longer = np.append(text, np.full(3 * page_size, 900 + number, dtype=np.int32))
        for length in range(len(text), len(longer) + 1, max(1, page_size // 4)):
            compute(cache, kv, longer, length)
        compute(cache, kv, longer, len(longer))
        start = kv.window_start
        seen = read_stamps(cache, cache.slots(kv, start, len(longer)))
        assert (seen[:, 0] == stamps(longer, SHARED)[start:]).all()
        cache.release(kv, longer)
    assert cache.accounts().is_idle
