"""Where a head's units lie, and heads whose width is no whole number of vectors.

Of such a head, tiles read the last elements as a vector that overlaps the one before. A query has
zeros where they overlap, and of sums the repeated ones are left out.
"""

from __future__ import annotations

from typing import NamedTuple

from engine.native_math import inlined
from engine.native_memory import int32_at, put_word


class Plane(NamedTuple):
    """Where a sequence's K and V lie in a layer. Addresses and bytes."""

    keys: int
    values: int
    pages: int
    """Numbers of the sequence's pages, int32."""
    page_size: int
    page_bytes: int
    token_bytes: int
    """From a token to the next one of its page."""
    head_bytes: int
    """From a head to the next one of its token."""
    unit_bytes: int
    kv_heads: int


@inlined
def find_units(plane: Plane, start: int, count: int, units: int) -> None:
    """For j < count: word j at `units` = how far the token at position start + j lies from the
    begin of K or V."""
    page, within = start // plane.page_size, start % plane.page_size
    place = int32_at(plane.pages + 4 * page) * plane.page_bytes + within * plane.token_bytes
    for j in range(count):
        put_word(units + 8 * j, place)
        place += plane.token_bytes
        within += 1
        if within == plane.page_size and j + 1 < count:
            within = 0
            page += 1
            place = int32_at(plane.pages + 4 * page) * plane.page_bytes
