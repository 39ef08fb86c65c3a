"""Queries and sums of a head in whole vectors, whatever its width; where a head's units lie.

Where a width is no multiple of `LANES`, tiles read the last elements as a vector that overlaps the
one before. A query has zeros where they overlap, and of sums the repeated ones are left out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.instructions import LANES
from engine.native_math import F32, I64, inlined
from engine.native_memory import array_at

LOWEST = np.float32(-1e30)
"""Where a running maximum starts. Finite: differences with it must not be NaN."""


class Plane(NamedTuple):
    """Where a sequence's K and V lie in a layer. Addresses and bytes."""

    keys: int
    values: int
    pages: int
    """Numbers of the sequence's pages, int32."""
    pages_count: int
    page_size: int
    page_bytes: int
    token_bytes: int
    """From a token to the next one of its page."""
    head_bytes: int
    """From a head to the next one of its token."""
    unit_bytes: int
    kv_heads: int


@inlined
def find_units(plane: Plane, start: int, units: I64) -> None:
    """units[j] = how far the token at position start + j lies from the begin of K or V."""
    pages = array_at(plane.pages, plane.pages_count, np.int32)
    page, within = start // plane.page_size, start % plane.page_size
    for j in range(len(units)):
        units[j] = np.int64(pages[page]) * plane.page_bytes + within * plane.token_bytes
        within += 1
        if within == plane.page_size:
            within = 0
            page += 1


@inlined
def spread(head: F32, scale: np.float32, out: F32) -> None:
    """head * scale in whole vectors; `out` is zeros before."""
    width = len(head)
    whole = width - width % LANES
    for d in range(whole):
        out[d] = head[d] * scale
    for d in range(whole, width):
        out[d + whole + LANES - width] = head[d] * scale


@inlined
def gather_sum(sums: F32, factor: np.float32, out: F32) -> None:
    """out += the sums of a head * factor."""
    width = len(out)
    whole = width - width % LANES
    for d in range(whole):
        out[d] += sums[d] * factor
    for d in range(whole, width):
        out[d] += sums[d + whole + LANES - width] * factor
