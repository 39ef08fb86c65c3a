import numpy as np
import pytest

from mem_cache.slot_allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from tests.support.kv_caches import PAGE_SIZES


def _allocator(page_size, pages):
    if page_size == 1:
        return TokenToKVPoolAllocator(pages)
    return PagedTokenToKVPoolAllocator(pages * page_size, page_size)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_gives_every_slot_once_but_never_page_0(page_size):
    allocator = _allocator(page_size, 5)
    slots = allocator.alloc(5 * page_size)
    assert slots is not None
    assert slots.dtype == np.int64
    assert sorted(slots.tolist()) == list(range(page_size, 6 * page_size))
    assert allocator.num_free == 0
    assert allocator.alloc(page_size) is None


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_refusal_changes_nothing(page_size):
    allocator = _allocator(page_size, 3)
    allocator.alloc(page_size)
    free = sorted(allocator.free_slots().tolist())
    assert allocator.alloc(3 * page_size) is None
    assert sorted(allocator.free_slots().tolist()) == free
    assert allocator.num_free == 2 * page_size


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_fresh_slots_are_neighbours(page_size):
    slots = _allocator(page_size, 4).alloc(3 * page_size)
    assert slots is not None
    assert slots.tolist() == list(range(page_size, 4 * page_size))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_freed_slots_are_given_again(page_size):
    allocator = _allocator(page_size, 2)
    first = allocator.alloc(page_size)
    second = allocator.alloc(page_size)
    assert first is not None
    assert second is not None
    allocator.free(first)
    again = allocator.alloc(page_size)
    assert again is not None
    assert again.tolist() == first.tolist()
    allocator.clear()
    assert allocator.num_free == 2 * page_size


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_freeing_twice_is_our_bug(page_size):
    allocator = _allocator(page_size, 3)
    slots = allocator.alloc(2 * page_size)
    assert slots is not None
    allocator.free(slots[page_size:])
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(slots)


def test_the_same_slot_twice_in_one_batch_is_our_bug():
    allocator = TokenToKVPoolAllocator(4)
    slots = allocator.alloc(4)
    assert slots is not None
    with pytest.raises(AssertionError, match="check 1"):
        allocator.free(slots[[0, 0, 1]])


def test_slot_0_cannot_be_freed():
    allocator = TokenToKVPoolAllocator(4)
    allocator.alloc(4)
    with pytest.raises(AssertionError, match="unit 0"):
        allocator.free(np.asarray([0], dtype=np.int64))


@pytest.mark.parametrize("picked", [slice(0, 3), slice(1, 5), slice(None, None, -1)])
def test_pages_are_freed_whole_and_in_order(picked):
    allocator = PagedTokenToKVPoolAllocator(16, 4)
    slots = allocator.alloc(8)
    assert slots is not None
    with pytest.raises(AssertionError, match="whole pages"):
        allocator.free(slots[picked])


def test_pages_are_allocated_whole():
    with pytest.raises(AssertionError, match="whole pages"):
        PagedTokenToKVPoolAllocator(16, 4).alloc(3)
    with pytest.raises(AssertionError, match="whole pages"):
        PagedTokenToKVPoolAllocator(15, 4)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_nothing_asked_nothing_given(page_size):
    allocator = _allocator(page_size, 2)
    slots = allocator.alloc(0)
    assert slots is not None
    assert len(slots) == 0
    allocator.free(slots)
    assert allocator.num_free == 2 * page_size
