"""Which workers hold which block: a hash table in flat arrays. Pure.

Open addressing with linear probing. A slot is 8 bytes of hash and 8 bytes of holders, a bit per
worker, for each 64 workers. Nothing else is kept, so memory is what the slots take:

* at most 2/3 of the slots are in use, and after a segment was made anew at least 1/4 hold a block;
* a block that nobody holds any more keeps its slot until its segment is made anew.

The top byte of a hash chooses one of 256 segments, each of which grows and shrinks by itself: of
10^6 blocks, one segment is made anew in about a millisecond.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt
    from numpy.typing import NDArray

    from kvferry.kv_events import BlockHash

_SEGMENT_BITS = 8
_SEGMENT_SHIFT = 64 - _SEGMENT_BITS
SEGMENTS = 1 << _SEGMENT_BITS
_SLOTS_MIN = 16
_WORD_BITS = 64
_FREE = 0
"""Of a slot. The block of this hash goes by `_STAND_IN`: one hash in 2^64 names two blocks."""
_STAND_IN = 0x9E3779B97F4A7C15
"""Any hash will do that nobody has chosen."""


class HolderTable:
    """Blocks and their holders, numbered from 0."""

    def __init__(self, blocks_max: int) -> None:
        """Holds at least `blocks_max` blocks if their hashes are evenly spread, and no more than
        that, rounded up to a power of two.
        """
        segment_max = max(_SLOTS_MIN // 2, -(-blocks_max // SEGMENTS))
        self._slots_max = 2 * _power_of_two(segment_max)
        self._segments = [_Segment(_SLOTS_MIN, 1) for _ in range(SEGMENTS)]
        self._words = 1

    @property
    def nbytes(self) -> int:
        """Memory of all slots, in bytes."""
        return 8 * (1 + self._words) * sum(len(each.hashes) for each in self._segments)

    @property
    def nbytes_max(self) -> int:
        """What `nbytes` cannot exceed with as many holders as now."""
        return 8 * (1 + self._words) * self._slots_max * SEGMENTS

    def __len__(self) -> int:
        """Blocks that somebody holds."""
        return sum(each.held for each in self._segments)

    @property
    def holders_max(self) -> int:
        """More than any holder's number that there is room for; a multiple of 8."""
        return self._words * _WORD_BITS

    def reserve(self, holder: int) -> None:
        """Make room for the bit of this holder."""
        while self._words * _WORD_BITS <= holder:
            self._words += 1
            for segment in self._segments:
                segment.columns.append(_zeros(len(segment.hashes)))

    def prefixes(
        self, blocks: Sequence[int] | NDArray[np.uint64], among: int
    ) -> tuple[list[int], list[int]]:
        """Of a chain of blocks, the lengths of prefixes that holders hold, the longest first, and
        for each the holders of so many blocks or more, as bits; `among` are those asked about.

        Holders of a block hold all before it, so this is a bisection: about log2(blocks) probes for
        each length.
        """
        segments = self._segments
        lengths: list[int] = []
        holders: list[int] = []
        # Between two positions with their holders, the longest first: some end there.
        spans = [(-1, among, len(blocks), 0)] if among else []
        while spans:
            low, low_bits, high, high_bits = spans.pop()
            if high - low == 1:
                if high > 0:
                    lengths.append(high)
                    holders.append(low_bits)
                continue
            middle = (low + high) // 2
            hash_ = int(blocks[middle]) or _STAND_IN
            segment = segments[hash_ >> _SEGMENT_SHIFT]
            # As `find`, written out: this is what a lookup is made of.
            hashes = segment.hashes
            last = len(hashes) - 1
            slot = hash_ & last
            while (found := hashes[slot]) != hash_ and found != _FREE:
                slot = (slot + 1) & last
            bits = high_bits
            if found != _FREE:
                columns = segment.columns
                held = columns[0][slot] if len(columns) == 1 else segment.holders_at(slot)
                bits |= held & low_bits
            if low_bits != bits:
                spans.append((low, low_bits, middle, bits))
            if bits != high_bits:
                spans.append((middle, bits, high, high_bits))
        return lengths, holders

    def add(self, block: BlockHash, holder: int) -> bool | None:
        """Note a holder. Whether it is a new one; None if the table is full."""
        hash_ = block or _STAND_IN
        word, bit = holder // _WORD_BITS, 1 << holder % _WORD_BITS
        segment = self._segments[hash_ >> _SEGMENT_SHIFT]
        slot = segment.find(hash_)
        bits = segment.columns[word][slot]
        if bits & bit:
            return False
        if not bits and not segment.holders_at(slot):
            if segment.held >= self._slots_max // 2:
                return None
            if segment.hashes[slot] == _FREE and 3 * segment.used >= 2 * len(segment.hashes):
                segment = segment.anew()
                self._segments[hash_ >> _SEGMENT_SHIFT] = segment
                slot = segment.find(hash_)
            segment.take(slot, hash_)
        segment.columns[word][slot] |= bit
        return True

    def discard(self, block: BlockHash, holder: int) -> bool:
        """Note that a holder holds a block no longer. Whether it did."""
        hash_ = block or _STAND_IN
        segment = self._segments[hash_ >> _SEGMENT_SHIFT]
        slot = segment.find(hash_)
        column = segment.columns[holder // _WORD_BITS]
        bit = 1 << holder % _WORD_BITS
        if not column[slot] & bit:
            return False
        column[slot] ^= bit
        segment.held -= not column[slot] and not segment.holders_at(slot)
        return True

    def forget(self, holder: int) -> None:
        """Take a holder off every block: one pass over the memory, some ms per 10^6 blocks."""
        word, bit = divmod(holder, _WORD_BITS)
        kept = np.uint64(~(1 << bit) & (1 << _WORD_BITS) - 1)
        for segment in self._segments:
            column = np.frombuffer(segment.columns[word], dtype=np.uint64)
            np.bitwise_and(column, kept, out=column)
            segment.held = int(np.count_nonzero(segment.any_holders()))

    def blocks_of(self, holder: int) -> Iterator[int]:
        """The hashes of all blocks of a holder. Looks at the whole table."""
        word, bit = divmod(holder, _WORD_BITS)
        for segment in self._segments:
            column = np.frombuffer(segment.columns[word], dtype=np.uint64)
            hashes = np.frombuffer(segment.hashes, dtype=np.uint64)
            yield from hashes[column & np.uint64(1 << bit) != 0].tolist()


class _Segment:
    """A part of the table. Slots are a power of two; never all of them are in use."""

    __slots__ = ("columns", "hashes", "held", "used")

    def __init__(self, slots: int, words: int) -> None:
        self.hashes = _zeros(slots)
        self.columns = [_zeros(slots) for _ in range(words)]
        """Of each slot, the holders: 64 to a word."""
        self.used = 0
        """Slots that have a hash."""
        self.held = 0
        """Slots that have a holder."""

    def find(self, hash_: int) -> int:
        """The slot of a hash, or the free one where it belongs."""
        hashes = self.hashes
        last = len(hashes) - 1
        slot = hash_ & last
        while (found := hashes[slot]) != hash_ and found != _FREE:
            slot = (slot + 1) & last
        return slot

    def take(self, slot: int, hash_: int) -> None:
        """Give a slot without holders to a hash, for a holder that comes next."""
        self.used += self.hashes[slot] == _FREE
        self.held += 1
        self.hashes[slot] = hash_

    def holders_at(self, slot: int) -> int:
        """The holders of a slot as bits."""
        if len(self.columns) == 1:
            return self.columns[0][slot]
        bits = 0
        for column in reversed(self.columns):
            bits = bits << _WORD_BITS | column[slot]
        return bits

    def any_holders(self) -> npt.NDArray[np.bool_]:
        """bool[slots]: whether a slot has a holder."""
        held = np.zeros(len(self.hashes), dtype=np.bool_)
        for column in self.columns:
            held |= np.frombuffer(column, dtype=np.uint64) != 0
        return held

    def anew(self) -> _Segment:
        """A segment of what is held here, at most half full, with room for one more."""
        fresh = _Segment(max(_SLOTS_MIN, 2 * _power_of_two(self.held + 1)), len(self.columns))
        for old_slot in np.flatnonzero(self.any_holders()).tolist():
            hash_ = self.hashes[old_slot]
            slot = fresh.find(hash_)
            fresh.take(slot, hash_)
            for old, new in zip(self.columns, fresh.columns, strict=True):
                new[slot] = old[old_slot]
        return fresh


def _zeros(count: int) -> array[int]:
    return array("Q", bytes(8 * count))


def _power_of_two(count: int) -> int:
    """The least one that is not below `count`."""
    return 1 << (count - 1).bit_length()
