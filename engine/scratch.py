"""Memory that a part of shared work needs for itself, by its address.

Not an array: Numba frees one after its last use, which taking its address may well be.
"""

from __future__ import annotations

from numba import types

from engine.native_math import inlined
from engine.native_memory import library_function, put_word, word_at

take = library_function("malloc", types.intp(types.uintp))
"""So many bytes; their address."""
give_back = library_function("free", types.void(types.intp))
"""What `take` gave."""
fill = library_function("memset", types.intp(types.intp, types.int32, types.uintp))
"""(address, byte, so many): put the same byte everywhere."""

_LINE = 64
"""Bytes of a cache line."""


@inlined
def take_lines(size: int) -> int:
    """As `take`, from the begin of a cache line on: a vector that lies in two costs twice."""
    taken = take(size + 2 * _LINE)
    address: int = (taken + 2 * _LINE) & -_LINE
    # What to give back, in the line before.
    put_word(address - 8, taken)
    return address


@inlined
def give_back_lines(address: int) -> None:
    """What `take_lines` gave."""
    give_back(word_at(address - 8))
