"""Bugs of the slot allocators and of the row table."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_SLOTS = "mem_cache/slot_allocator.py"
_SLOT_TESTS = ("tests/unit/mem_cache/test_slot_allocator.py",)
_ROWS = "mem_cache/req_to_token_pool.py"
_ROW_TESTS = ("tests/unit/mem_cache/test_req_to_token_pool.py",)

SLOT_MUTANTS = (
    Mutant(
        "free-slot-by-slot",
        "Pages are freed whole: part of a page may still be read.",
        _SLOTS,
        "        pages = slots[:: self.page_size] // self.page_size\n"
        "        # A page has one owner, hence is freed whole: all its slots, in order.\n"
        '        assert np.array_equal(self._slots_of(pages), slots), "slots to free are not whole '
        'pages"\n',
        "        pages = np.unique(slots // self.page_size)\n",
        _SLOT_TESTS,
    ),
    Mutant(
        "freed-twice-unnoticed",
        "A slot that is free cannot be freed.",
        _SLOTS,
        '        assert not self._is_free[units].any(), "check 1: freed twice"\n',
        "",
        _SLOT_TESTS,
    ),
    Mutant(
        "twice-in-one-batch-unnoticed",
        "A slot cannot be freed twice in one batch.",
        _SLOTS,
        '        assert (self._ordinal[units] == ordinals).all(), "check 1: freed twice in one '
        'batch"\n',
        "",
        _SLOT_TESTS,
    ),
    Mutant(
        "slot-0-given",
        "The target of padded writes is never given to a request.",
        _SLOTS,
        "self._stack[:] = np.arange(self.units, 0, -1)",
        "self._stack[:] = np.arange(self.units - 1, -1, -1)",
        _SLOT_TESTS,
    ),
    Mutant(
        "generation-not-bumped",
        "A reference to a row that was given back is stale.",
        _ROWS,
        "        self._generations[row] += 1\n",
        "",
        _ROW_TESTS,
    ),
    Mutant(
        "generations-reset",
        "Generations never go back: a stale reference stays stale.",
        _ROWS,
        "[generation + 1 for generation in self._generations]",
        "[0 for _ in self._generations]",
        _ROW_TESTS,
    ),
    Mutant(
        "row-read-is-a-view",
        "What was read from a row stays as it was when the row is reused.",
        _ROWS,
        "return self.table[row, start:stop].astype(np.int64)",
        "return self.table[row, start:stop]",
        _ROW_TESTS,
    ),
)
