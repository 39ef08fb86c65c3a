"""Which KV slots are free: token by token, or in pages of consecutive slots.

Neither knows what a slot holds. Slot 0 (page 0) is the target of padded writes and never given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvferry.ids import SlotIndices


class SlotAllocator(Protocol):
    """Hands out whole pages of slots and takes whole pages back.

    `alloc` is called once per request and step at most; `free` at checkpoint, release and
    eviction. Both do array operations only and cost O(slots).
    """

    page_size: int
    num_slots: int
    """Usable slots; physical ones are `page_size` more."""

    @property
    def num_free(self) -> int:
        """Slots that `alloc` can still give."""
        ...

    def alloc(self, num_slots: int) -> SlotIndices | None:
        """[num_slots] fresh slots, whole pages; None, with nothing changed, if too few are free."""
        ...

    def free(self, slots: SlotIndices) -> None:
        """Take whole pages back. A slot that is free already is an assertion failure."""
        ...

    def free_slots(self) -> SlotIndices:
        """All free slots, in no particular order."""
        ...

    def clear(self) -> None:
        """Take everything back."""
        ...


class _FreeStack:
    """Free unit numbers 1..n as a stack, with a flag for each: both in flat arrays."""

    def __init__(self, units: int) -> None:
        self._stack: NDArray[np.int64] = np.empty(units, dtype=np.int64)
        self._is_free: NDArray[np.bool_] = np.zeros(units + 1, dtype=np.bool_)
        self._ordinal: NDArray[np.int64] = np.zeros(units + 1, dtype=np.int64)
        self.units = units
        self.count = 0
        self.clear()

    def clear(self) -> None:
        # Descending, so that the first units taken are 1, 2, 3...: neighbours stay neighbours.
        self._stack[:] = np.arange(self.units, 0, -1)
        self._is_free[1:] = True
        self.count = self.units

    def take(self, count: int) -> NDArray[np.int64] | None:
        if count > self.count:
            return None
        taken = self._stack[self.count - count : self.count][::-1].copy()
        # Ledger check 1: what is handed out is in range, unique and disjoint from what is live.
        assert self._is_free[taken].all(), "check 1: the free list holds a unit that is in use"
        self._is_free[taken] = False
        self.count -= count
        return taken

    def put(self, units: NDArray[np.int64]) -> None:
        count = len(units)
        if count == 0:
            return
        assert int(units.min()) > 0, "check 1: unit 0 is never handed out"
        assert not self._is_free[units].any(), "check 1: freed twice"
        # A unit that is there twice keeps its last ordinal only: uniqueness without sorting.
        ordinals = np.arange(count)
        self._ordinal[units] = ordinals
        assert (self._ordinal[units] == ordinals).all(), "check 1: freed twice in one batch"
        self._is_free[units] = True
        self._stack[self.count : self.count + count] = units[::-1]
        self.count += count

    def all(self) -> NDArray[np.int64]:
        free = self._stack[: self.count]
        assert int(np.count_nonzero(self._is_free)) == self.count, "check 1: free flags disagree"
        return free


class TokenToKVPoolAllocator:
    """Page size 1: every slot stands alone. Slots 1..num_slots."""

    def __init__(self, num_slots: int) -> None:
        self.page_size = 1
        self.num_slots = num_slots
        self._slots = _FreeStack(num_slots)

    @property
    def num_free(self) -> int:
        """Slots that `alloc` can still give."""
        return self._slots.count

    def alloc(self, num_slots: int) -> SlotIndices | None:
        """[num_slots] fresh slots; None, with nothing changed, if too few are free."""
        return self._slots.take(num_slots)

    def free(self, slots: SlotIndices) -> None:
        """Take slots back. One that is free already is an assertion failure."""
        self._slots.put(slots)

    def free_slots(self) -> SlotIndices:
        """All free slots, in no particular order."""
        return self._slots.all().copy()

    def clear(self) -> None:
        """Take everything back."""
        self._slots.clear()


class PagedTokenToKVPoolAllocator:
    """Pages of `page_size` consecutive slots. Pages 1..num_slots / page_size."""

    def __init__(self, num_slots: int, page_size: int) -> None:
        assert num_slots % page_size == 0, f"{num_slots} slots are not whole pages of {page_size}"
        self.page_size = page_size
        self.num_slots = num_slots
        self._pages = _FreeStack(num_slots // page_size)
        self._offsets: NDArray[np.int64] = np.arange(page_size, dtype=np.int64)

    @property
    def num_free(self) -> int:
        """Slots that `alloc` can still give."""
        return self._pages.count * self.page_size

    def alloc(self, num_slots: int) -> SlotIndices | None:
        """[num_slots] fresh slots, whole pages; None, with nothing changed, if too few are free."""
        assert num_slots % self.page_size == 0, f"{num_slots} slots are not whole pages"
        pages = self._pages.take(num_slots // self.page_size)
        return None if pages is None else self._slots_of(pages)

    def free(self, slots: SlotIndices) -> None:
        """Take whole pages back. A page that is free already is an assertion failure."""
        pages = slots[:: self.page_size] // self.page_size
        # A page has one owner, hence is freed whole: all its slots, in order.
        assert np.array_equal(self._slots_of(pages), slots), "slots to free are not whole pages"
        self._pages.put(pages)

    def free_slots(self) -> SlotIndices:
        """All free slots, in no particular order."""
        return self._slots_of(self._pages.all())

    def clear(self) -> None:
        """Take everything back."""
        self._pages.clear()

    def _slots_of(self, pages: NDArray[np.int64]) -> SlotIndices:
        return (pages[:, None] * self.page_size + self._offsets).ravel()
