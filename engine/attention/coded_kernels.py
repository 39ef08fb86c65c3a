"""Decode attention over K/V of any element type and arrangement, read where it lies.

As `cpu_kernels`, but each tile of keys and of values is first decoded to float32 in memory that
stays in the cache. Elements come as unsigned integers of their size; the machine is little-endian.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from engine.attention.cpu_kernels import LOWEST, accumulate, score, weigh
from engine.crew import share
from engine.native_math import F32, I32, I64, Task, inlined, kernel, task
from engine.native_memory import address_of, array_at
from kvferry.config import KvArrangement, KvDType

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mem_cache.layout import PagedLayout

_TILE = 64
"""Keys decoded at once: K or V of 64 tokens of three heads of 64 elements are 48 KiB."""
_FLOAT32, _FLOAT16, _BFLOAT16, _INT8, _E4M3, _E5M2 = range(6)
FORMATS = {
    KvDType.FLOAT32: _FLOAT32,
    KvDType.FLOAT16: _FLOAT16,
    KvDType.BFLOAT16: _BFLOAT16,
    KvDType.INT8: _INT8,
    KvDType.FLOAT8_E4M3: _E4M3,
    KvDType.FLOAT8_E5M2: _E5M2,
}
"""The number of a format in a kernel's `form`."""
_HALF_SCALE = np.float32(2.0**112)
"""float32's exponent bias less float16's."""
_E4M3_SCALE = np.float32(2.0**120)
_SCALE_ELEMENTS = 4
"""int8: four bytes of scale before the elements."""


@inlined
def _as_float(bits: Any) -> Any:
    return np.uint32(bits).view(np.float32)


@inlined
def _from_half(bits: Any) -> Any:
    """float16 -> float32: a product gets subnormal numbers right, infinity and NaN are kept."""
    magnitude = bits & np.uint32(0x7FFF)
    moved = (bits & np.uint32(0x8000)) << np.uint32(16) | magnitude << np.uint32(13)
    special = _as_float(moved | np.uint32(0x7F800000))
    number = _as_float(moved) * _HALF_SCALE
    return special if magnitude >= np.uint32(0x7C00) else number


@inlined
def _from_e4m3(bits: Any) -> Any:
    """float8 e4m3fn -> float32: no infinity, and all bits set is NaN."""
    magnitude = bits & np.uint32(0x7F)
    moved = (bits & np.uint32(0x80)) << np.uint32(24) | magnitude << np.uint32(20)
    number = _as_float(moved) * _E4M3_SCALE
    return np.float32(np.nan) if magnitude == np.uint32(0x7F) else number


@inlined
def _load_int8(unit: NDArray[Any], out: F32) -> None:
    scale = np.uint32(unit[0]) | np.uint32(unit[1]) << np.uint32(8)
    scale |= np.uint32(unit[2]) << np.uint32(16) | np.uint32(unit[3]) << np.uint32(24)
    step = _as_float(scale)
    for d in range(len(out)):
        out[d] = np.float32(np.int8(unit[_SCALE_ELEMENTS + d])) * step


@inlined
def _load_float(unit: NDArray[Any], form: int, out: F32) -> None:
    if form == _BFLOAT16:
        for d in range(len(out)):
            out[d] = _as_float(np.uint32(unit[d]) << np.uint32(16))
    elif form == _FLOAT16:
        for d in range(len(out)):
            out[d] = _from_half(np.uint32(unit[d]))
    elif form == _E5M2:
        for d in range(len(out)):
            out[d] = _from_half(np.uint32(unit[d]) << np.uint32(8))
    elif form == _E4M3:
        for d in range(len(out)):
            out[d] = _from_e4m3(np.uint32(unit[d]))
    else:
        for d in range(len(out)):
            out[d] = _as_float(unit[d])


class Placement(NamedTuple):
    """Where the units (one head of one token) of a pool lie, and how to decode them."""

    page_size: int
    kv_heads: int
    token_step: int
    """Units from a token to the next one of its page."""
    head_step: int
    """Units from a head to the next one of its token."""
    form: int
    """One of `FORMATS`."""


def placement(layout: PagedLayout) -> Placement:
    """That of a layout."""
    by_head = layout.order is KvArrangement.HND
    return Placement(
        page_size=layout.page_size,
        kv_heads=layout.heads,
        token_step=1 if by_head else layout.heads,
        head_step=layout.page_size if by_head else 1,
        form=FORMATS[layout.dtype],
    )


@inlined
def _find_units(
    pages: I32, first_page: int, start: int, count: int, place: Placement, units: I64
) -> None:
    """units[j] = head 0 of the token at position start + j."""
    page_units = place.page_size * place.kv_heads
    for j in range(count):
        position = start + j
        page = np.int64(pages[first_page + position // place.page_size])
        units[j] = page * page_units + position % place.page_size * place.token_step


@kernel
def _load_tile(stored: NDArray[Any], units: I64, count: int, place: Placement, tile: F32) -> None:
    """stored [units, width] -> tile [count, H_kv, D]."""
    for j in range(count):
        for h in range(place.kv_heads):
            unit = stored[units[j] + h * place.head_step]
            if place.form == _INT8:
                _load_int8(unit, tile[j, h])
            else:
                _load_float(unit, place.form, tile[j, h])


@kernel
def _attend_rows(  # noqa: PLR0913
    queries: F32, keys: NDArray[Any], values: NDArray[Any], out: F32, rows: I64,
    pages: I32, place: Placement, start_row: int, stop_row: int,
) -> None:  # fmt: skip
    kv_heads, head_dim = place.kv_heads, queries.shape[2]
    group = queries.shape[1] // kv_heads
    scale = np.float32(1.0 / np.sqrt(head_dim))
    units = np.empty(_TILE, dtype=np.int64)
    tile = np.empty((_TILE, kv_heads, head_dim), dtype=np.float32)
    within = np.arange(_TILE)
    scores = np.empty((kv_heads, group, _TILE), dtype=np.float32)
    query = np.empty((kv_heads, group, head_dim), dtype=np.float32)
    sums = np.empty((kv_heads, group, head_dim), dtype=np.float32)
    highest = np.empty((kv_heads, group), dtype=np.float32)
    weight_sum = np.empty((kv_heads, group), dtype=np.float32)
    for i in range(start_row, stop_row):
        token, first_page, first, length = rows[i]
        query[:] = queries[token].reshape(query.shape) * scale
        sums[:] = np.float32(0)
        weight_sum[:] = np.float32(0)
        highest[:] = LOWEST
        for start in range(first, length, _TILE):
            count = min(_TILE, length - start)
            _find_units(pages, first_page, start, count, place, units)
            _load_tile(keys, units, count, place, tile)
            score(query, tile, within, count, scores)
            for h in range(kv_heads):
                for g in range(group):
                    weigh(scores[h, g, :count], highest[h], weight_sum[h], sums[h], g)
            _load_tile(values, units, count, place, tile)
            accumulate(scores, tile, within, count, sums)
        for h in range(kv_heads):
            for g in range(group):
                out[token, h * group + g] = sums[h, g] / weight_sum[h, g]


@cache
def _attend_part(stored: np.dtype[Any]) -> Task:
    """The part of a shared work that is one row, for pools of this unsigned integer."""
    element = stored.type

    @task
    def part(arguments: int, index: int) -> int:
        (
            queries, tokens, heads, head_dim, keys, units, width, values, out, rows, count, pages,
            pages_count, page_size, kv_heads, token_step, head_step, form,
        ) = array_at(arguments, 18, np.int64)  # fmt: skip
        shape, plane = (tokens, heads, head_dim), (units, width)
        _attend_rows(
            array_at(queries, shape, np.float32),
            array_at(keys, plane, element),
            array_at(values, plane, element),
            array_at(out, shape, np.float32),
            array_at(rows, (count, 4), np.int64),
            array_at(pages, pages_count, np.int32),
            Placement(page_size, kv_heads, token_step, head_step, form),
            index,
            index + 1,
        )
        return 0

    return part


@kernel
def _attend(  # noqa: PLR0913
    board: int, part: int, queries: F32, keys: NDArray[Any], values: NDArray[Any], out: F32,
    rows: I64, pages: I32, place: Placement,
) -> None:  # fmt: skip
    tokens, heads, head_dim = queries.shape
    units, width = keys.shape
    arguments = np.array([
        address_of(queries), tokens, heads, head_dim, address_of(keys), units, width,
        address_of(values), address_of(out), address_of(rows), len(rows), address_of(pages),
        len(pages), place.page_size, place.kv_heads, place.token_step, place.head_step, place.form,
    ])  # fmt: skip
    share(board, part, arguments, len(rows))


def coded_decode_attention(  # noqa: PLR0913
    queries: F32, keys: NDArray[Any], values: NDArray[Any], out: F32, rows: I64,
    pages: I32, place: Placement, board: int,
) -> None:  # fmt: skip
    """As `cpu_kernels.decode_attention`; keys, values: one layer's units [n, width], unsigned."""
    for array in (queries, keys, values, out, rows, pages):
        assert array.flags.c_contiguous, "parts of the work get its address"
    part = _attend_part(keys.dtype)
    _attend(board, part.address, queries, keys, values, out, rows, pages, place)
