import numpy as np
import pytest
import torch

from kvferry.cache_key import Sharing
from kvferry.errors import ErrorKind
from kvferry.ids import Attempt, AttemptId, ExtraKey, RequestId
from kvferry.kv_events import BlocksRemoved, BlocksStored, event_block_tokens, prompt_block_hashes
from mem_cache.errors import LedgerError, OutOfRows, OutOfSlots
from tests.support.kv_caches import (
    PAGE_SIZES,
    SHARED,
    assert_reads_its_tokens,
    compute,
    stamps,
    tiny_cache,
    tokens_of,
    write_stamps,
)

every_page_size = pytest.mark.parametrize("page_size", PAGE_SIZES)


def _publish(cache, token_ids, extra_key=SHARED):
    kv = cache.open("publisher", token_ids, extra_key)
    compute(cache, kv, token_ids, len(token_ids))
    cache.release(kv, token_ids)


# --- open ---------------------------------------------------------------------------------------


@every_page_size
def test_a_fully_cached_prompt_leaves_its_last_token_to_compute(page_size):
    cache = tiny_cache(page_size)
    text = tokens_of(range(2 * page_size))
    _publish(cache, text)
    kv = cache.open("a", text, SHARED)
    assert kv.prefix_len == (2 * page_size - 1) // page_size * page_size
    assert kv.prefix_len == kv.committed_len == kv.cache_protected_len == kv.allocated_len
    assert_reads_its_tokens(cache, kv, text)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_prompt_lengths_around_the_page(length):
    cache = tiny_cache(4)
    text = tokens_of(range(length))
    kv = cache.open("a", text, SHARED)
    assert cache.extend(kv, length).tolist() == list(range(4, 4 + length))
    assert kv.allocated_len == -(-length // 4) * 4
    cache.commit(kv, length)
    cache.release(kv, text)
    again = cache.open("b", text, SHARED)
    assert again.prefix_len == (length - 1) // 4 * 4
    cache.release(again, None)
    assert cache.accounts().is_idle


def test_no_row_is_told_apart_from_no_slot_and_changes_nothing():
    cache = tiny_cache(4, rows=2)
    text = tokens_of(range(9))
    _publish(cache, text)
    held = [cache.open(name, tokens_of([7]), SHARED) for name in ("a", "b")]
    accounts = cache.accounts()
    with pytest.raises(OutOfRows, match="rows: 0 free of 2") as caught:
        cache.open("c", text, SHARED)
    assert caught.value.kind is ErrorKind.OVERLOADED
    assert caught.value.status.retryable
    assert cache.accounts() == accounts
    cache.release(held[0], None)
    assert cache.open("c", text, SHARED).prefix_len == 8


@every_page_size
def test_extra_keys_isolate(page_size):
    cache = tiny_cache(page_size)
    text = tokens_of(range(2 * page_size + 1))
    _publish(cache, text)
    tenant = ExtraKey("tenant")
    assert cache.open("a", text, tenant).prefix_len == 0
    assert cache.open("b", text, SHARED).prefix_len == 2 * page_size


@every_page_size
def test_what_is_not_shareable_neither_matches_nor_publishes(page_size):
    cache = tiny_cache(page_size)
    text = tokens_of(range(2 * page_size + 1))
    _publish(cache, text)
    nodes = list(cache.tree.nodes())
    kv = cache.open("a", text, SHARED, sharing=Sharing.PRIVATE)
    assert kv.prefix_len == 0
    compute(cache, kv, text, len(text))
    cache.checkpoint(kv, text)
    assert kv.cache_protected_len == 0
    cache.release(kv, text)
    assert list(cache.tree.nodes()) == nodes


@every_page_size
def test_what_is_recomputed_matches_nothing_and_is_published(page_size):
    cache = tiny_cache(page_size)
    text = tokens_of(range(3 * page_size))
    _publish(cache, text[: 2 * page_size])
    kv = cache.open("a", text, SHARED, sharing=Sharing.RECOMPUTED)
    assert kv.prefix_len == 0
    compute(cache, kv, text, len(text))
    cache.release(kv, text)
    assert (kv.cache_protected_len, kv.cache_inserted_len) == (3 * page_size, page_size)
    assert cache.open("b", tokens_of(range(4 * page_size)), SHARED).prefix_len == 3 * page_size


def test_a_matched_prefix_cannot_be_evicted_by_its_own_extension():
    cache = tiny_cache(4, pages=4)
    text = tokens_of(range(12))
    _publish(cache, text)
    longer = tokens_of([*range(12), *range(50, 58)])
    kv = cache.open("a", longer, SHARED)
    with pytest.raises(OutOfSlots):
        cache.extend(kv, 20)
    assert_reads_its_tokens(cache, kv, longer)
    cache.extend(kv, 16)


# --- extend -------------------------------------------------------------------------------------


def test_extend_uses_the_rest_of_the_page_before_a_new_one():
    cache = tiny_cache(4)
    kv = cache.open("a", tokens_of([1, 2]), SHARED)
    first = cache.extend(kv, 2)
    cache.commit(kv, 2)
    free = cache.allocator.num_free
    assert cache.extend(kv, 4).tolist() == [first[1] + 1, first[1] + 2]
    assert cache.allocator.num_free == free
    cache.commit(kv, 4)
    cache.extend(kv, 5)
    assert cache.allocator.num_free == free - 4


def test_extend_again_after_a_step_that_did_not_run_gives_the_same_slots():
    cache = tiny_cache(4)
    kv = cache.open("a", tokens_of([1, 2]), SHARED)
    slots = cache.extend(kv, 6)
    assert cache.extend(kv, 6).tolist() == slots.tolist()
    assert cache.extend(kv, 3).tolist() == slots[:3].tolist()


@every_page_size
def test_extension_under_pressure_evicts_only_what_it_needs(page_size):
    cache = tiny_cache(page_size, pages=4)
    _publish(cache, tokens_of(range(page_size)))
    _publish(cache, tokens_of(range(500, 500 + 2 * page_size)))
    kv = cache.open("a", tokens_of([9]), SHARED)
    cache.extend(kv, page_size)
    assert cache.accounts().evictable == 3 * page_size
    cache.extend(kv, 2 * page_size)
    assert cache.accounts().evictable == 2 * page_size
    with pytest.raises(OutOfSlots):
        cache.extend(kv, 4 * page_size + 1)
    assert cache.accounts().evictable == 2 * page_size
    cache.extend(kv, 4 * page_size)
    assert cache.accounts().evictable == 0


def test_report_of_no_slots_says_who_holds_them():
    cache = tiny_cache(4, pages=4)
    attempt = AttemptId(RequestId("r1"), Attempt(2))
    text = tokens_of(range(6))
    a = cache.open(attempt, text, SHARED)
    compute(cache, a, text, 6)
    cache.checkpoint(a, text)
    cache.pin(a)
    b = cache.open("handoff", tokens_of([9]), SHARED, inbound=True)
    cache.extend(b, 3)
    with pytest.raises(OutOfSlots) as caught:
        cache.extend(a, 17)
    assert (caught.value.needed, caught.value.supply) == (12, 4)
    assert caught.value.kind is ErrorKind.OVERLOADED
    assert str(caught.value).splitlines() == [
        "12 KV slots needed, 4 free or evictable",
        "rows: 6 free of 8",
        "slots: 4 free (1 pages of 4), 0 evictable, 4 protected, 4 private, 4 inbound, "
        "0 loading, of 16",
        "  r1#2: kv_allocated_len 8, cache_protected_len 4, pinned",
        "  handoff: kv_allocated_len 4, cache_protected_len 0, inbound",
    ]


@pytest.mark.parametrize("new_len", [1, 1025])
def test_extend_is_bounded_by_what_is_committed_and_the_context(new_len):
    cache = tiny_cache(4, pages=512, context_length=1024)
    kv = cache.open("a", tokens_of([1, 2]), SHARED)
    cache.extend(kv, 2)
    cache.commit(kv, 2)
    with pytest.raises(AssertionError, match="cannot be extended"):
        cache.extend(kv, new_len)


def test_the_last_page_may_reach_beyond_the_context():
    cache = tiny_cache(16, context_length=20)
    kv = cache.open("a", tokens_of([1]), SHARED)
    assert len(cache.extend(kv, 20)) == 20
    assert kv.allocated_len == 32


def test_commit_within_what_is_allocated():
    cache = tiny_cache(4)
    kv = cache.open("a", tokens_of([1, 2]), SHARED)
    cache.extend(kv, 4)
    cache.commit(kv, 3)
    for wrong in (2, 5):
        with pytest.raises(AssertionError, match="cannot commit"):
            cache.commit(kv, wrong)


# --- checkpoint ---------------------------------------------------------------------------------


@every_page_size
def test_checkpoint_frees_duplicates_and_rewrites_the_row(page_size):
    """Two requests compute the same prompt at once; the second ends up reading the first's."""
    cache = tiny_cache(page_size)
    text = tokens_of(range(3 * page_size))
    first, second = cache.open("a", text, SHARED), cache.open("b", text, SHARED)
    compute(cache, first, text, len(text))
    compute(cache, second, text, len(text))
    cache.checkpoint(first, text[: 2 * page_size])
    free = cache.allocator.num_free
    cache.checkpoint(second, text)
    assert cache.allocator.num_free == free + 2 * page_size
    shared = cache.slots(first, 0, 2 * page_size).tolist()
    assert cache.slots(second, 0, 2 * page_size).tolist() == shared
    assert (first.cache_inserted_len, second.cache_inserted_len) == (2 * page_size, page_size)
    assert second.cache_protected_len == 3 * page_size
    free_slots = cache.allocator.free_slots()
    write_stamps(cache, free_slots, np.full((len(free_slots), 2), -1.0, dtype=np.float32))
    assert_reads_its_tokens(cache, second, text)
    cache.release(first, text)
    cache.release(second, text)
    assert cache.accounts().evictable == 3 * page_size


@every_page_size
def test_checkpoints_of_chunks_equal_one_of_the_whole(page_size):
    cache = tiny_cache(page_size)
    text = tokens_of(range(3 * page_size + 1))
    kv = cache.open("a", text, SHARED)
    chunk = max(1, page_size // 2 + 1)
    for end in [*range(chunk, len(text), chunk), len(text)]:
        compute(cache, kv, text, end)
        cache.checkpoint(kv, text[:end])
        assert kv.cache_protected_len == end // page_size * page_size
        assert_reads_its_tokens(cache, kv, text)
    assert kv.cache_inserted_len == len(text) // page_size * page_size
    cache.release(kv, text)
    assert cache.accounts().is_idle


def test_checkpoint_of_less_than_before_does_nothing():
    cache = tiny_cache(4)
    text = tokens_of(range(8))
    kv = cache.open("a", text, SHARED)
    compute(cache, kv, text, 8)
    cache.checkpoint(kv, text)
    node = kv.last_node
    cache.checkpoint(kv, text[:5])
    assert (kv.last_node, kv.cache_protected_len) == (node, 8)


def test_only_what_is_computed_can_be_published():
    cache = tiny_cache(4)
    text = tokens_of(range(8))
    kv = cache.open("a", text, SHARED)
    cache.extend(kv, 8)
    cache.commit(kv, 4)
    with pytest.raises(AssertionError, match="has not computed"):
        cache.checkpoint(kv, text)


def test_other_tokens_than_were_locked_are_our_bug():
    cache = tiny_cache(4)
    text = tokens_of(range(8))
    kv = cache.open("a", text, SHARED)
    compute(cache, kv, text, 8)
    cache.checkpoint(kv, text[:4])
    with pytest.raises(AssertionError, match="tokens changed"):
        cache.checkpoint(kv, text[::-1].copy())


# --- handoffs -----------------------------------------------------------------------------------


@every_page_size
def test_inbound_is_an_account_of_its_own_until_adopted(page_size):
    cache = tiny_cache(page_size)
    text = tokens_of(range(2 * page_size + 1))
    _publish(cache, text[:page_size])
    kv = cache.open("a", text, SHARED, inbound=True)
    assert kv.prefix_len == page_size
    cache.extend(kv, len(text))
    accounts = cache.accounts()
    assert (accounts.private, accounts.inbound) == (0, kv.allocated_len - page_size)
    assert accounts.protected == page_size
    with pytest.raises(AssertionError, match="inbound"):
        cache.checkpoint(kv, text[:page_size])
    with pytest.raises(AssertionError, match="inbound"):
        cache.pin(kv)
    write_stamps(cache, cache.slots(kv, page_size, len(text)), stamps(text, SHARED)[page_size:])
    cache.commit(kv, len(text))
    other = cache.open("b", text, SHARED)
    assert other.prefix_len == page_size
    cache.adopt(kv)
    assert cache.accounts().inbound == 0
    cache.checkpoint(kv, text)
    assert_reads_its_tokens(cache, kv, text)
    assert cache.open("c", text, SHARED).prefix_len == 2 * page_size
    with pytest.raises(AssertionError, match="not inbound"):
        cache.adopt(kv)


def test_an_aborted_handoff_publishes_nothing_whatever_it_is_released_with():
    cache = tiny_cache(4)
    text = tokens_of(range(9))
    kv = cache.open("a", text, SHARED, inbound=True)
    cache.extend(kv, 9)
    cache.commit(kv, 9)
    cache.release(kv, text)
    assert cache.accounts().free == cache.num_slots


@every_page_size
def test_a_handoff_moves_exactly_the_missing_tokens(page_size):
    source, sink = tiny_cache(page_size), tiny_cache(page_size)
    text = tokens_of(range(3 * page_size + 1))
    _publish(sink, text[:page_size])
    sent = source.open("a", text, SHARED)
    compute(source, sent, text, len(text))
    source.pin(sent)
    received = sink.open("a", text, SHARED, inbound=True)
    resume_at = received.committed_len
    assert resume_at == page_size
    slots = sink.extend(received, len(text))
    payload = torch.empty(1 << 20, dtype=torch.uint8)
    whole = source.layout.whole
    used = source.pool.gather(source.slots(sent, resume_at, len(text)), whole, payload)
    assert used == (len(text) - resume_at) * source.layout.bytes_per_token
    sink.pool.scatter(slots, whole, payload[:used])
    sink.commit(received, len(text))
    sink.adopt(received)
    assert_reads_its_tokens(sink, received, text)


def test_pins_count_shared_slots_once_and_hold_off_release():
    cache = tiny_cache(4)
    text = tokens_of(range(9))
    _publish(cache, text[:8])
    a, b = cache.open("a", text, SHARED), cache.open("b", text, SHARED)
    compute(cache, a, text, 9)
    cache.pin(a)
    cache.pin(b)
    cache.pin(b)
    assert cache.accounts().outbound_pinned == 8 + 4
    cache.unpin(b)
    with pytest.raises(AssertionError, match="still read by a handoff"):
        cache.release(b, text)
    cache.unpin(b)
    cache.release(b, text)
    with pytest.raises(AssertionError, match="has no pin"):
        cache.unpin(a) or cache.unpin(a)
    assert cache.accounts().outbound_pinned == 0


# --- release ------------------------------------------------------------------------------------


@every_page_size
@pytest.mark.parametrize("publish", [True, False])
def test_release_gives_back_partial_page_and_preallocated_tail(page_size, publish):
    cache = tiny_cache(page_size)
    text = tokens_of(range(2 * page_size + 1))
    kv = cache.open("a", text, SHARED)
    compute(cache, kv, text, 2 * page_size - 1)
    cache.extend(kv, 4 * page_size)
    cache.release(kv, text if publish else None)
    kept = (2 * page_size - 1) // page_size * page_size if publish else 0
    accounts = cache.accounts()
    assert (accounts.evictable, accounts.free) == (kept, cache.num_slots - kept)
    assert accounts.is_idle


def test_release_publishes_no_more_than_is_computed():
    """The last sampled token has no K/V yet, though the request's tokens contain it."""
    cache = tiny_cache(1)
    text = tokens_of(range(5))
    kv = cache.open("a", text, SHARED)
    compute(cache, kv, text, 4)
    cache.release(kv, text)
    assert cache.accounts().evictable == 4


def test_second_release_is_our_bug_also_when_the_row_has_a_new_holder():
    cache = tiny_cache(4, rows=1)
    kv = cache.open("a", tokens_of([1]), SHARED)
    row, generation = kv.req_pool_idx, kv.req_generation
    cache.release(kv, None)
    with pytest.raises(LedgerError, match="check 6"):
        cache.release(kv, None)
    cache.open("b", tokens_of([1]), SHARED)
    kv.req_pool_idx, kv.req_generation = row, generation
    with pytest.raises(LedgerError, match="generation"):
        cache.slots(kv, 0, 0)


# --- views --------------------------------------------------------------------------------------


@every_page_size
def test_events_tell_what_the_tree_holds(page_size):
    cache = tiny_cache(page_size, pages=4)
    block = event_block_tokens(page_size)
    text = tokens_of(range(4 * page_size))
    hashes = tuple(prompt_block_hashes(text, block, SHARED))
    _publish(cache, text)
    expected = [BlocksStored(hashes)] if hashes else []
    assert cache.take_events() == expected
    assert set(cache.snapshot_blocks()) == set(hashes)
    kv = cache.open("a", tokens_of([9]), SHARED)
    cache.extend(kv, 4 * page_size)
    assert cache.take_events() == ([BlocksRemoved(hashes)] if hashes else [])
    assert cache.snapshot_blocks() == ()


def test_live_requests_are_those_with_a_row():
    cache = tiny_cache(4)
    a, b = (cache.open(name, tokens_of([1]), SHARED) for name in "ab")
    assert cache.live_requests() == (a, b)
    cache.release(a, None)
    assert cache.live_requests() == (b,)


def test_drop_cache_needs_an_idle_worker():
    cache = tiny_cache(4)
    _publish(cache, tokens_of(range(8)))
    kv = cache.open("a", tokens_of([1]), SHARED)
    with pytest.raises(AssertionError, match="live requests"):
        cache.drop_cache()
    cache.release(kv, None)
    cache.drop_cache()
    assert cache.accounts().free == cache.num_slots


def test_slots_beyond_what_is_allocated_are_refused():
    cache = tiny_cache(4)
    kv = cache.open("a", tokens_of([1]), SHARED)
    cache.extend(kv, 1)
    assert len(cache.slots(kv, 0, 4)) == 4
    with pytest.raises(AssertionError, match="has no slots"):
        cache.slots(kv, 0, 5)
