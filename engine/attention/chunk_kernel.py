"""Attention of many new tokens of a sequence, over KV of any element type.

A part of the work is one KV head and `tile_tokens` tokens: their query heads are the rows of one
matrix. Keys come `KEY_TILE` at a time, decoded once for all rows, with a running softmax (Milakov
and Gimelshein, arXiv:1805.02867). For `BLOCK_ROWS` rows at a time scores become weights and sums
before the next rows come, so that scores never leave the nearest cache; what no row of a block may
see is skipped. Tiles of keys lie at multiples of `KEY_TILE`: no bit depends on how a prompt is cut,
as long as its parts come here.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from engine.attention.heads import LOWEST, Plane, find_units, gather_sum, spread
from engine.attention.tiles import (
    BLOCK_ROWS,
    PANEL,
    cap_scores,
    copy_unit,
    highest_of,
    product_tile,
    shrinkage,
    transpose_tile,
    weigh,
)
from engine.instructions import LANES
from engine.native_math import F32, I64, Task, inlined, task
from engine.native_memory import address_of, array_at

KEY_TILE = 64
"""K and V of so many tokens of a head of 64 elements are 32 KiB."""
_TILE_ROWS = 96
"""About so many rows share what decoding a tile of keys costs."""
ARGUMENTS, ITEM = 16, 5
"""Numbers of the work and of one of its items, see `chunk_part`."""


def tile_tokens(group: int) -> int:
    """New tokens of one part of the work."""
    return max(1, _TILE_ROWS // group)


class _Tile(NamedTuple):
    """The keys and values that all rows of an item meet next, and where they are decoded to."""

    base: int
    """The position of its first key."""
    length: int
    keys: int
    """[KEY_TILE / PANEL, columns, PANEL]."""
    values: int
    """[KEY_TILE, columns]."""
    columns: int
    """Elements of a head in whole panels."""


class _Block(NamedTuple):
    """BLOCK_ROWS rows of an item: addresses."""

    query: int
    scores: int
    sums: int
    factors: int


@inlined
def _decode_tile(
    form: int, plane: Plane, width: int, offset: int, first: int, tile: _Tile, units: I64
) -> None:
    """Fill a tile of one head; values before position `first` and behind the last key with 0."""
    find_units(plane, tile.base, units[: tile.length])
    for j in range(tile.length, KEY_TILE):
        units[j] = units[tile.length - 1]
    values = array_at(tile.values, (KEY_TILE, tile.columns), np.float32)
    for j in range(KEY_TILE):
        if tile.base + j < first or j >= tile.length:
            values[j] = np.float32(0)
        else:
            copy_unit(form, plane.values + units[j] + offset, width, address_of(values[j]))
    for j in range(KEY_TILE):
        units[j] += plane.keys
    for j in range(0, KEY_TILE, LANES):
        panel = tile.keys + 4 * (j // PANEL * tile.columns * PANEL + j % PANEL)
        transpose_tile(form, address_of(units) + 8 * j, offset, width, panel, 4 * PANEL)


@inlined
def _weigh_block(
    block: _Block, vectors: int, starts: I64, stops: I64, cap: float, highest: F32, totals: F32
) -> None:
    """Turn the scores of a block into weights, 0 outside [starts, stops), and find the factors that
    bring what was summed before to the new scale."""
    factors = array_at(block.factors, BLOCK_ROWS, np.float32)
    for r in range(BLOCK_ROWS):
        scores = block.scores + 4 * KEY_TILE * r
        if cap < np.inf:
            cap_scores(scores, vectors, cap)
        if starts[r] > 0 or stops[r] < vectors * LANES:
            row = array_at(scores, vectors * LANES, np.float32)
            row[: starts[r]] = LOWEST
            row[stops[r] :] = LOWEST
        top = highest_of(scores, vectors, highest[r])
        factors[r] = shrinkage(highest[r], top)
        highest[r] = top
        totals[r] = totals[r] * factors[r] + weigh(scores, vectors, top)


@inlined
def _attend_block(  # noqa: PLR0913
    tile: _Tile, block: _Block, width: int, starts: I64, stops: I64, cap: float, highest: F32,
    totals: F32,
) -> None:  # fmt: skip
    """What a block's rows make of a tile's keys: those that the last row sees, at most."""
    count = min(max(stops[BLOCK_ROWS - 1], 0), tile.length)
    if count == 0 or starts[0] >= KEY_TILE:
        return
    row_bytes, panels = 4 * tile.columns, (count + PANEL - 1) // PANEL
    folded = (width + LANES - 1) // LANES * LANES
    for p in range(panels):
        product_tile(0, block.query, row_bytes, tile.keys + p * PANEL * row_bytes, 4 * PANEL,
                     folded, block.scores + 4 * p * PANEL, 4 * KEY_TILE, block.factors)  # fmt: skip
    _weigh_block(block, 2 * panels, starts, stops, cap, highest, totals)
    for c in range(0, tile.columns, PANEL):
        product_tile(1, block.scores, 4 * KEY_TILE, tile.values + 4 * c, row_bytes,
                     count, block.sums + 4 * c, row_bytes, block.factors)  # fmt: skip


@cache
def chunk_part(form: int) -> Task:
    """The part of a shared work that is one item, for units of this form (`vectors.FORMS`).

    An item: the first of its tokens (a row of queries [T, H, D] and out), how many, where their
    sequence's pages begin, the position of the first token, and the KV head.
    """

    @task
    def part(arguments: int, index: int) -> int:
        (
            queries, keys, values, out, items, pages, pages_count, heads,
            cap_at, window, width, page_size, kv_heads, token_step, head_step, unit_bytes,
        ) = array_at(arguments, ARGUMENTS, np.int64)  # fmt: skip
        token, tokens, first_page, position, kv_head = array_at(
            items + 8 * ITEM * index, ITEM, np.int64
        )
        cap = array_at(cap_at, 1, np.float32)[0]
        plane = Plane(
            keys, values, pages + 4 * first_page, pages_count - first_page, page_size,
            page_size * kv_heads * unit_bytes, token_step * unit_bytes, head_step * unit_bytes,
            unit_bytes, kv_heads,
        )  # fmt: skip
        group = heads // kv_heads
        columns = (width + PANEL - 1) // PANEL * PANEL
        rows = (tokens * group + BLOCK_ROWS - 1) // BLOCK_ROWS * BLOCK_ROWS
        query = np.zeros((rows, columns), dtype=np.float32)
        sums = np.zeros((rows, columns), dtype=np.float32)
        totals = np.zeros(rows, dtype=np.float32)
        highest = np.full(rows, LOWEST, dtype=np.float32)
        scale = np.float32(1.0 / np.sqrt(width))
        shape, start = (tokens, heads, width), 4 * token * heads * width
        asked = array_at(queries + start, shape, np.float32)
        for r in range(tokens * group):
            spread(asked[r // group, kv_head * group + r % group], scale, query[r])

        tile_keys = np.zeros((KEY_TILE, columns), dtype=np.float32)
        tile_values = np.zeros((KEY_TILE, columns), dtype=np.float32)
        scores = np.zeros((BLOCK_ROWS, KEY_TILE), dtype=np.float32)
        factors = np.zeros(BLOCK_ROWS, dtype=np.float32)
        units = np.empty(KEY_TILE, dtype=np.int64)
        starts = np.empty(BLOCK_ROWS, dtype=np.int64)
        stops = np.empty(BLOCK_ROWS, dtype=np.int64)
        first, end = max(position + 1 - window, 0), position + tokens
        for base in range(first - first % KEY_TILE, end, KEY_TILE):
            tile = _Tile(base, min(KEY_TILE, end - base), address_of(tile_keys),
                         address_of(tile_values), columns)  # fmt: skip
            _decode_tile(form, plane, width, kv_head * plane.head_bytes, first, tile, units)
            for b in range(0, rows, BLOCK_ROWS):
                for r in range(BLOCK_ROWS):
                    # Rows that only fill the last block see what its last token sees.
                    stop = position + min((b + r) // group, tokens - 1) + 1 - base
                    starts[r] = min(max(stop - window, 0), KEY_TILE)
                    stops[r] = min(max(stop, 0), KEY_TILE)
                block = _Block(address_of(query[b]), address_of(scores), address_of(sums[b]),
                               address_of(factors))  # fmt: skip
                _attend_block(tile, block, width, starts, stops, cap,
                              highest[b : b + BLOCK_ROWS], totals[b : b + BLOCK_ROWS])  # fmt: skip
        averaged = array_at(out + start, shape, np.float32)
        for r in range(tokens * group):
            head = averaged[r // group, kv_head * group + r % group]
            head[:] = np.float32(0)
            gather_sum(sums[r], np.float32(1) / totals[r], head)
        return 0

    return part
