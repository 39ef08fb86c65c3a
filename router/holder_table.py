"""Which workers hold which block: a hash table in one flat array. Pure.

Open addressing with linear probing. A slot is 8 bytes of hash and, for each 64 workers, 8 bytes of
holders, a bit for each. Nothing else is kept, so memory is what the slots take:

* at most 2/3 of the slots are in use, and after a segment was made anew at least 1/4 hold a block;
* a block that nobody holds any more keeps its slot until its segment is made anew.

The top byte of a hash chooses one of 256 segments, each of which grows and shrinks by itself: of
10^6 blocks, one segment is made anew in a tenth of a millisecond. The addresses of the largest
table there may be are reserved at once; memory is what was written, page by page.

Blocks are looked up, stored and removed in compiled loops: `slots` is [segments, slots, 1 + words]
there, a hash and its holders in a row, and `sizes` are the slots that each segment may use.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np

from router.compiled import compiled, inlined

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_SEGMENT_BITS = 8
_SEGMENT_SHIFT = np.uint64(64 - _SEGMENT_BITS)
SEGMENTS = 1 << _SEGMENT_BITS
_SLOTS_MIN = 16
_WORD_BITS = 64
_ONE = np.uint64(1)
_NONE = np.uint64(0)
_FREE = np.uint64(0)
"""Of a slot. The block of this hash goes by `_STAND_IN`: one hash in 2^64 names two blocks."""
_STAND_IN = np.uint64(0x9E3779B97F4A7C15)
"""Any hash will do that nobody has chosen."""
_SPANS_MAX = 80
"""Of a bisection at one time: one for each halving of a prompt."""
_SIZE, _USED, _HELD = 0, 1, 2
"""Rows of `sizes`: slots of a segment, those that have a hash, and those that have a holder."""


class HolderTable:
    """Blocks and their holders, numbered from 0."""

    def __init__(self, blocks_max: int) -> None:
        """Holds at least `blocks_max` blocks if their hashes are evenly spread, and no more than
        that, rounded up to a power of two.
        """
        segment_max = max(_SLOTS_MIN // 2, -(-blocks_max // SEGMENTS))
        self._slots_max = 2 * _power_of_two(segment_max)
        self._sizes = np.zeros((3, SEGMENTS), dtype=np.int64)
        self._sizes[_SIZE] = _SLOTS_MIN
        self._words = 1
        self._memory, self._slots = _reserved(self._slots_max, self._words)

    @property
    def nbytes(self) -> int:
        """Memory of all slots, in bytes."""
        return 8 * (1 + self._words) * int(self._sizes[_SIZE].sum())

    @property
    def nbytes_max(self) -> int:
        """What `nbytes` cannot exceed with as many holders as now."""
        return 8 * (1 + self._words) * self._slots_max * SEGMENTS

    def __len__(self) -> int:
        """Blocks that somebody holds."""
        return int(self._sizes[_HELD].sum())

    @property
    def holders_max(self) -> int:
        """More than any holder's number that there is room for; a multiple of 64."""
        return self._words * _WORD_BITS

    def reserve(self, holder: int) -> None:
        """Make room for the bit of this holder."""
        if holder < self.holders_max:
            return
        before, kept = self._slots, 1 + self._words
        self._words = holder // _WORD_BITS + 1
        self._memory, self._slots = _reserved(self._slots_max, self._words)
        for segment, size in enumerate(self._sizes[_SIZE].tolist()):
            self._slots[segment, :size, :kept] = before[segment, :size]

    def note_hits(
        self,
        blocks: NDArray[np.uint64],
        among: NDArray[np.uint64],
        holders: NDArray[np.intp],
        step: int,
        found: NDArray[np.int64],
    ) -> None:
        """Write into `found`, at the positions of these holders, `step` for each leading block of
        a chain that they hold. `among` are those that are asked about, a bit for each: others
        hold nothing. There may be no such holder: what `found` has in its place stays."""
        _note_hits(self._slots, self._sizes, blocks, among, holders, step, found)

    def add(self, blocks: NDArray[np.uint64], holder: int, room: int) -> tuple[int, bool]:
        """Note a holder of these blocks, one after the other, until it holds `room` more than
        before or the table is full. How many are new to it, and whether none was left out."""
        added = 0
        while True:
            done, fresh, segment = _add(self._slots, self._sizes, blocks, holder, room - added)
            added += fresh
            blocks = blocks[done:]
            if segment == SEGMENTS:
                return added, not blocks.size
            self._make_anew(segment)

    def discard(self, blocks: NDArray[np.uint64], holder: int) -> int:
        """Note that a holder holds these blocks no longer. How many of them it did."""
        return int(_discard(self._slots, self._sizes, blocks, holder))

    def forget(self, holder: int) -> None:
        """Take a holder off every block: one pass over the memory, some ms per 10^6 blocks."""
        _forget(self._slots, self._sizes, holder)

    def blocks_of(self, holder: int) -> Iterator[int]:
        """The hashes of all blocks of a holder. Looks at the whole table."""
        word, bit = divmod(holder, _WORD_BITS)
        for segment, size in enumerate(self._sizes[_SIZE].tolist()):
            slots = self._slots[segment, :size]
            yield from slots[slots[:, 1 + word] & np.uint64(1 << bit) != 0, 0].tolist()

    def _make_anew(self, segment: int) -> None:
        """Keep what is held; at most half of the slots are in use then, with one block more."""
        before, held = (int(self._sizes[row, segment]) for row in (_SIZE, _HELD))
        size = max(_SLOTS_MIN, 2 * _power_of_two(held + 1))
        _move(self._slots[segment], before, size)
        self._sizes[:, segment] = size, held, held
        if size < before:
            # What is not used any more is zeros, and need not be in memory.
            row = self._slots.strides[1]
            first = self._slots.strides[0] * segment
            start = -(-(first + row * size) // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (first + row * before) // mmap.PAGESIZE * mmap.PAGESIZE
            if start < end:
                self._memory.madvise(mmap.MADV_DONTNEED, start, end - start)


def _reserved(slots_max: int, words: int) -> tuple[mmap.mmap, NDArray[np.uint64]]:
    """Zeros that take no memory before they are written; [segments, slots, 1 + words]."""
    shape = (SEGMENTS, slots_max, 1 + words)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, 8 * shape[0] * shape[1] * shape[2], flags=flags)
    # A large page would have the used and the unused parts of several segments.
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory, np.frombuffer(memory, dtype=np.uint64).reshape(shape)


def _power_of_two(count: int) -> int:
    """The least one that is not below `count`."""
    return 1 << (count - 1).bit_length()


@inlined
def _find(slots: NDArray[np.uint64], size: int, hash_: np.uint64) -> np.int64:
    """The slot of a hash in a segment, or the free one where it belongs."""
    last = size - 1
    slot = np.int64(hash_ & np.uint64(last))
    while slots[slot, 0] != hash_ and slots[slot, 0] != _FREE:
        slot = (slot + 1) & last
    return slot


@inlined
def _has_holders(slot: NDArray[np.uint64]) -> bool:
    bits = _NONE
    for word in range(1, slot.size):
        bits |= slot[word]
    return bool(bits != _NONE)


@inlined
def _copy(words: NDArray[np.uint64], to: NDArray[np.uint64]) -> None:
    """Word by word: assigning an array takes a second to compile."""
    for word in range(words.size):
        to[word] = words[word]


@inlined
def _note(length_of: NDArray[np.int64], length: int, bits: NDArray[np.uint64]) -> None:
    """Those of the first bits, but not of the second, hold so many blocks."""
    for holder in range(length_of.size):
        word, bit = holder // _WORD_BITS, np.uint64(holder % _WORD_BITS)
        if (bits[0, word] & ~bits[1, word]) >> bit & _ONE:
            length_of[holder] = length


@compiled(
    "void(uint64[:, :, ::1], int64[:, ::1], Array(uint64, 1, 'C', readonly=True),"
    " Array(uint64, 1, 'C', readonly=True), int64[::1], int64, int64[::1])"
)
def _note_hits(
    slots: NDArray[np.uint64],
    sizes: NDArray[np.int64],
    blocks: NDArray[np.uint64],
    asked: NDArray[np.uint64],
    holders: NDArray[np.intp],
    step: int,
    found: NDArray[np.int64],
) -> None:
    """`step` for each leading block that `holders` hold.

    Holders of a block hold all before it, so this is a bisection for all of them together: about
    log2(blocks) probes for each length that occurs.
    """
    words = asked.size
    length_of = np.zeros(words * _WORD_BITS, dtype=np.int64)
    # Between two positions with their holders, the longest last: some end there.
    spans = np.empty((_SPANS_MAX, 2), dtype=np.int64)
    bits = np.zeros((_SPANS_MAX, 2, words), dtype=np.uint64)
    held = np.empty(words, dtype=np.uint64)
    spans[0, 0], spans[0, 1] = -1, blocks.size
    _copy(asked, bits[0, 0])
    count = 1
    while count:
        count -= 1
        low, high = spans[count, 0], spans[count, 1]
        if high - low == 1:
            _note(length_of, high, bits[count])
            continue
        middle = (low + high) // 2
        hash_ = blocks[middle] or _STAND_IN
        segment = np.int64(hash_ >> _SEGMENT_SHIFT)
        slot = _find(slots[segment], sizes[_SIZE, segment], hash_)
        some_end = some_go_on = False
        for word in range(words):
            held[word] = bits[count, 0, word] & slots[segment, slot, 1 + word]
            held[word] |= bits[count, 1, word]
            some_end |= held[word] != bits[count, 0, word]
            some_go_on |= held[word] != bits[count, 1, word]
        if some_end and some_go_on:
            spans[count + 1, 0], spans[count + 1, 1] = middle, high
            _copy(held, bits[count + 1, 0])
            _copy(bits[count, 1], bits[count + 1, 1])
        if some_end:
            spans[count, 1] = middle
            _copy(held, bits[count, 1])
        elif some_go_on:
            spans[count, 0] = middle
            _copy(held, bits[count, 0])
        count += some_end + some_go_on
    for position, holder in enumerate(holders):
        if holder < length_of.size:
            found[position] = step * length_of[holder]


@compiled(
    "UniTuple(int64, 3)(uint64[:, :, ::1], int64[:, ::1],"
    " Array(uint64, 1, 'C', readonly=True), int64, int64)"
)
def _add(
    slots: NDArray[np.uint64],
    sizes: NDArray[np.int64],
    blocks: NDArray[np.uint64],
    holder: int,
    room: int,
) -> tuple[int, int, int]:
    """Note a holder until `room` blocks are new to it, or one finds no slot. How many were looked
    at, and were new; and the segment to be made anew before the next one, or else `SEGMENTS`."""
    word, bit = 1 + holder // _WORD_BITS, _ONE << np.uint64(holder % _WORD_BITS)
    added = 0
    for position in range(blocks.size):
        if added >= room:
            return position, added, SEGMENTS
        hash_ = blocks[position] or _STAND_IN
        number = np.int64(hash_ >> _SEGMENT_SHIFT)
        size = sizes[_SIZE, number]
        segment = slots[number]
        slot = _find(segment, size, hash_)
        if segment[slot, word] & bit:
            continue
        if not _has_holders(segment[slot]):
            if sizes[_HELD, number] >= segment.shape[0] // 2:
                return position, added, SEGMENTS
            if segment[slot, 0] == _FREE:
                if 3 * sizes[_USED, number] >= 2 * size:
                    return position, added, int(number)
                segment[slot, 0] = hash_
                sizes[_USED, number] += 1
            sizes[_HELD, number] += 1
        segment[slot, word] |= bit
        added += 1
    return blocks.size, added, SEGMENTS


@compiled("int64(uint64[:, :, ::1], int64[:, ::1], Array(uint64, 1, 'C', readonly=True), int64)")
def _discard(
    slots: NDArray[np.uint64], sizes: NDArray[np.int64], blocks: NDArray[np.uint64], holder: int
) -> int:
    """Take a holder off these blocks. How many it held."""
    word, bit = 1 + holder // _WORD_BITS, _ONE << np.uint64(holder % _WORD_BITS)
    removed = 0
    for block in blocks:
        hash_ = block or _STAND_IN
        number = np.int64(hash_ >> _SEGMENT_SHIFT)
        segment = slots[number]
        slot = _find(segment, sizes[_SIZE, number], hash_)
        if segment[slot, word] & bit:
            segment[slot, word] ^= bit
            sizes[_HELD, number] -= not _has_holders(segment[slot])
            removed += 1
    return removed


@compiled("void(uint64[:, :, ::1], int64[:, ::1], int64)")
def _forget(slots: NDArray[np.uint64], sizes: NDArray[np.int64], holder: int) -> None:
    """Take a holder off every block."""
    word, kept = 1 + holder // _WORD_BITS, ~(_ONE << np.uint64(holder % _WORD_BITS))
    for number in range(slots.shape[0]):
        segment, held = slots[number], 0
        for slot in range(sizes[_SIZE, number]):
            segment[slot, word] &= kept
            held += _has_holders(segment[slot])
        sizes[_HELD, number] = held


@compiled("void(uint64[:, ::1], int64, int64)")
def _move(segment: NDArray[np.uint64], before: int, size: int) -> None:
    """Have what is held in the first slots, `before` of them, in `size` of them."""
    old = np.empty((before, segment.shape[1]), dtype=np.uint64)
    for slot in range(before):
        _copy(segment[slot], old[slot])
        for word in range(segment.shape[1]):
            segment[slot, word] = _NONE
    for slot in range(before):
        if _has_holders(old[slot]):
            _copy(old[slot], segment[_find(segment, size, old[slot, 0])])
