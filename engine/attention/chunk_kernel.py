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

from engine.attention.heads import Plane, find_units
from engine.attention.row_tiles import (
    FACTORS,
    LOWEST,
    STATE_BYTES,
    TOTALS,
    bound_row,
    cap_scores,
    gather_head,
    spread_head,
    weigh_rows,
)
from engine.attention.tiles import (
    BLOCK_ROWS,
    PANEL,
    clear_unit,
    pack_unit,
    product_tile,
    transpose_tile,
)
from engine.instructions import LANES
from engine.native_math import Task, inlined, task
from engine.native_memory import float32_at, put_float32, put_word, word_at, words_at
from engine.scratch import fill, give_back_lines, take_lines

KEY_TILE = 64
"""K and V of so many tokens of a head of 64 elements are 32 KiB."""
_ROWS_FEW, _ROWS_MANY = 96, 192
"""About so many rows share what decoding a tile of keys costs: more for long chunks, of which there
are parts enough for all threads."""
_LONG = 256
"""Tokens of a long chunk."""
ARGUMENTS, ITEM = 15, 5
"""Numbers of the work and of one of its items, see `chunk_part`."""
_PANEL_BYTES = 4 * PANEL
_SCORES_STEP = 4 * KEY_TILE


def tile_tokens(group: int, chunk: int) -> int:
    """New tokens of one part of the work, of a chunk of so many. No bit depends on it."""
    return max(1, (_ROWS_MANY if chunk >= _LONG else _ROWS_FEW) // group)


class _Tile(NamedTuple):
    """The keys and values that all rows of an item meet next, and where they are decoded to."""

    base: int
    """The position of its first key."""
    length: int
    keys: int
    """[KEY_TILE / PANEL, columns, PANEL]."""
    values: int
    """[columns / PANEL, KEY_TILE, PANEL]."""
    columns: int
    """Elements of a head in whole panels."""
    width: int
    """Elements of a head."""


class _Block(NamedTuple):
    """BLOCK_ROWS rows of an item: addresses."""

    query: int
    scores: int
    sums: int
    state: int
    """See `weigh_rows`."""
    seen: int
    """How many positions each row sees: words."""


@inlined
def _decode_tile(form: int, plane: Plane, head: int, first: int, tile: _Tile, units: int) -> None:
    """Fill a tile of one head, with zeros for values before position `first`.

    Behind the last key, keys are the last one's, and values stay what they were: none is read.
    """
    find_units(plane, tile.base, tile.length, units)
    last = word_at(units + 8 * (tile.length - 1))
    for j in range(tile.length, KEY_TILE):
        put_word(units + 8 * j, last)
    offset, step = head * plane.head_bytes, KEY_TILE * _PANEL_BYTES
    for j in range(tile.length):
        place = tile.values + j * _PANEL_BYTES
        if tile.base + j < first:
            clear_unit(tile.width, place, step)
        else:
            unit = plane.values + word_at(units + 8 * j) + offset
            pack_unit(form, unit, tile.width, place, step)
    for j in range(0, KEY_TILE, LANES):
        place = tile.keys + 4 * (j // PANEL * tile.columns * PANEL + j % PANEL)
        transpose_tile(form, units + 8 * j, plane.keys + offset, tile.width, place, _PANEL_BYTES)


@inlined
def _bound_rows(tile: _Tile, block: _Block, vectors: int, window: int) -> None:
    """Put out of sight what each row does not see."""
    for r in range(BLOCK_ROWS):
        stop = word_at(block.seen + 8 * r) - tile.base
        start, stop = max(stop - window, 0), min(max(stop, 0), KEY_TILE)
        bound_row(block.scores + r * _SCORES_STEP, vectors, min(start, KEY_TILE), stop)


@inlined
def _attend_block(tile: _Tile, block: _Block, window: int, cap: float) -> None:
    """What a block's rows make of a tile's keys: those that the last row sees, at most."""
    first_stop = word_at(block.seen) - tile.base
    last_stop = word_at(block.seen + 8 * (BLOCK_ROWS - 1)) - tile.base
    count = min(last_stop, tile.length)
    if count <= 0 or first_stop - window >= KEY_TILE:
        return
    row_bytes, panels = 4 * tile.columns, (count + PANEL - 1) // PANEL
    folded, vectors = (tile.width + LANES - 1) // LANES * LANES, panels * (PANEL // LANES)
    for p in range(panels):
        product_tile(0, block.query, row_bytes, tile.keys + p * PANEL * row_bytes, _PANEL_BYTES,
                     folded, block.scores + p * _PANEL_BYTES, _SCORES_STEP, 0)  # fmt: skip
    if cap < np.inf:
        for r in range(BLOCK_ROWS):
            cap_scores(block.scores + r * _SCORES_STEP, vectors, cap)
    if first_stop < panels * PANEL or last_stop > window:
        _bound_rows(tile, block, vectors, window)
    weigh_rows(BLOCK_ROWS, block.scores, _SCORES_STEP, vectors, block.state)
    for p in range(tile.columns // PANEL):
        product_tile(1, block.scores, _SCORES_STEP, tile.values + p * KEY_TILE * _PANEL_BYTES,
                     _PANEL_BYTES, count, block.sums + p * _PANEL_BYTES, row_bytes,
                     block.state + FACTORS)  # fmt: skip


@cache
def chunk_part(form: int) -> Task:
    """The part of a shared work that is one item, for units of this form (`vectors.FORMS`).

    An item: the first of its tokens (a row of queries [T, H, D] and out), how many, where their
    sequence's pages begin, the position of the first token, and the KV head.
    """

    @task
    def part(arguments: int, index: int) -> int:
        (
            queries, keys, values, out, items, pages, heads,
            cap_at, window, width, page_size, kv_heads, token_step, head_step, unit_bytes,
        ) = words_at(arguments, ARGUMENTS)  # fmt: skip
        token, tokens, first_page, position, kv_head = words_at(items + 8 * ITEM * index, ITEM)
        plane = Plane(
            keys, values, pages + 4 * first_page, page_size,
            page_size * kv_heads * unit_bytes, token_step * unit_bytes, head_step * unit_bytes,
            unit_bytes, kv_heads,
        )  # fmt: skip
        group, cap = heads // kv_heads, float32_at(cap_at)
        columns = (width + PANEL - 1) // PANEL * PANEL
        blocks = (tokens * group + BLOCK_ROWS - 1) // BLOCK_ROWS
        rows, row_bytes = blocks * BLOCK_ROWS, 4 * columns

        query = take_lines((2 * rows + 2 * KEY_TILE) * row_bytes + BLOCK_ROWS * _SCORES_STEP
                           + blocks * STATE_BYTES + 8 * (KEY_TILE + rows))  # fmt: skip
        sums = query + rows * row_bytes
        tile_keys = sums + rows * row_bytes
        tile_values = tile_keys + KEY_TILE * row_bytes
        scores = tile_values + KEY_TILE * row_bytes
        states = scores + BLOCK_ROWS * _SCORES_STEP
        units = states + blocks * STATE_BYTES
        seen = units + 8 * KEY_TILE
        fill(query, 0, 2 * rows * row_bytes)
        scale = np.float32(1.0 / np.sqrt(width))
        for r in range(rows):
            # Rows that only fill the last block see what its last token sees.
            t = min(r // group, tokens - 1)
            put_word(seen + 8 * r, position + t + 1)
            state = states + r // BLOCK_ROWS * STATE_BYTES + 4 * (r % BLOCK_ROWS)
            put_float32(state, np.float32(LOWEST))
            put_float32(state + TOTALS, np.float32(0))
            if r < tokens * group:
                head = (token + t) * heads + kv_head * group + r % group
                spread_head(queries + 4 * head * width, width, query + r * row_bytes, scale)

        first, end = max(position + 1 - window, 0), position + tokens
        for base in range(first - first % KEY_TILE, end, KEY_TILE):
            tile = _Tile(base, min(KEY_TILE, end - base), tile_keys, tile_values, columns, width)
            _decode_tile(form, plane, kv_head, first, tile, units)
            for b in range(blocks):
                row = b * BLOCK_ROWS
                block = _Block(query + row * row_bytes, scores, sums + row * row_bytes,
                               states + b * STATE_BYTES, seen + 8 * row)  # fmt: skip
                _attend_block(tile, block, window, cap)
        for r in range(tokens * group):
            state = states + r // BLOCK_ROWS * STATE_BYTES + 4 * (r % BLOCK_ROWS)
            factor = np.float32(1) / float32_at(state + TOTALS)
            head = (token + r // group) * heads + kv_head * group + r % group
            gather_head(sums + r * row_bytes, width, out + 4 * head * width, 0, factor)
        give_back_lines(query)
        return 0

    return part
