"""Attention of a few new tokens per sequence, over KV of any element type, read where it lies.

A part of the work is `SPLIT` positions of one sequence, for all its heads: the KV of neighbouring
tokens is then read as one stream, once for all query heads of a KV head and all new tokens. Whoever
does the last part of a sequence combines them (flash-decoding: Dao et al. 2023). Splits lie at
multiples of `SPLIT`, and each query head of a token is summed in an order of its own: no bit
depends on the number of threads, on the batch, or on how many tokens of a sequence are new.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from engine.attention.heads import Plane, find_units
from engine.attention.row_tiles import (
    LOWEST,
    STATE_BYTES,
    TOTALS,
    bound_row,
    cap_scores,
    gather_head,
    shrinkage,
    spread_head,
    weigh_rows,
)
from engine.attention.tiles import AHEAD, COLUMNS, KEYS, ask_for_keys, score_tile, value_tile
from engine.instructions import LANES
from engine.native_math import Task, inlined, task
from engine.native_memory import (
    add,
    float32_at,
    put_float32,
    put_word,
    store,
    word_at,
    words_at,
)
from engine.scratch import fill, give_back_lines, take_lines

SPLIT = 128
"""Positions of one part of the work."""
_BATCH_BYTES = 16 * 1024
"""Of tokens whose values are summed before the next tokens': about what the nearest cache holds."""
ARGUMENTS, ITEM = 17, 6
"""Numbers of the work and of one of its items, see `decode_part`."""
_SCORES_STEP = 4 * SPLIT
_ROWS = 3
"""Rows that are weighed at once."""
COUNTER_WORDS = 8
"""Of the count of a sequence's parts that are done: a cache line, as several threads write it."""


class _Rows(NamedTuple):
    """What the query heads of one KV head's tokens are: rows of scores and of sums."""

    length: int
    """At least 2: tiles have two or three."""
    width: int
    """Elements of a head."""
    step: int
    """Bytes from a row of whole vectors to the next."""


class _Split(NamedTuple):
    """The positions of an item, counted from the split's begin, which scores are counted from."""

    base: int
    begin: int
    """Where the first tile of keys begins."""
    first: int
    """The first that is seen."""
    stop: int


class _Sight(NamedTuple):
    """What new tokens see of their sequence."""

    end: int
    """Up to which position, exclusive, the first of them."""
    window: int
    group: int
    """Query heads of a KV head: neighbouring rows of one token."""
    cap: float
    """Of scores."""


class _Partials(NamedTuple):
    """What the parts of a sequence left. Bytes."""

    begin: int
    """An address. There lie the sums of all rows of the first part, then its maxima and weights."""
    parts: int
    step: int
    """From a part to the next."""
    maxima: int
    totals: int


def partial_size(group: int, width: int) -> int:
    """Most float32 that a part leaves per KV head and token: sums, maximum and weight of rows."""
    return max(2, group) * (-(-width // LANES) * LANES + 2)


@inlined
def _find_addresses(plane: Plane, split: _Split, addresses: int) -> int:
    """Addresses of head 0 of the tokens' K, in whole tiles, of their V, and of more to look ahead.

    Returns how many there are of K.
    """
    count = split.stop - split.begin
    find_units(plane, split.base + split.begin, count, addresses)
    whole = (count + KEYS - 1) // KEYS * KEYS
    last = word_at(addresses + 8 * (count - 1))
    for j in range(count):
        unit = word_at(addresses + 8 * j)
        put_word(addresses + 8 * j, plane.keys + unit)
        put_word(addresses + 8 * (whole + j), plane.values + unit)
    for j in range(count, whole):
        put_word(addresses + 8 * j, plane.keys + last)
    for j in range(whole + count, whole + count + AHEAD + KEYS):
        put_word(addresses + 8 * j, plane.values + last)
    return whole


@inlined
def _ask_for_first(plane: Plane, addresses: int, count: int) -> None:
    """Ask for what no earlier tile asks for."""
    for j in range(0, min(count, AHEAD), KEYS):
        for h in range(plane.kv_heads):
            ask_for_keys(addresses + 8 * j, h * plane.head_bytes, plane.unit_bytes)


@inlined
def _score(
    form: int, plane: Plane, rows: _Rows, query: int, addresses: int, count: int, scores: int
) -> None:
    """Scores of all rows with the keys at `count` addresses, in tiles."""
    twos = 2 * (-rows.length % 3)
    for j in range(0, count, KEYS):
        units = addresses + 8 * j
        for h in range(plane.kv_heads):
            offset = h * plane.head_bytes
            ask_for_keys(units + 8 * AHEAD, offset, plane.unit_bytes)
            asked = query + h * rows.length * rows.step
            score = scores + h * rows.length * _SCORES_STEP + 4 * j
            for r in range(0, rows.length - twos, 3):
                score_tile(form, 3, asked + r * rows.step, rows.step, units, offset,
                           rows.width, score + r * _SCORES_STEP, _SCORES_STEP)  # fmt: skip
            for r in range(rows.length - twos, rows.length, 2):
                score_tile(form, 2, asked + r * rows.step, rows.step, units, offset,
                           rows.width, score + r * _SCORES_STEP, _SCORES_STEP)  # fmt: skip


@inlined
def _add_values(  # noqa: PLR0913
    form: int, columns: int, rows: _Rows, at: int, count: int, offset: int, first: int,
    weights: int, sums: int,
) -> None:  # fmt: skip
    """Add `columns` vectors of one head's values to the sums of all its rows."""
    step = _SCORES_STEP
    twos = 2 * (-rows.length % 3)
    for r in range(0, rows.length - twos, 3):
        value_tile(form, 3, columns, at, count, offset, rows.width, first, weights + r * step,
                   step, sums + r * rows.step, rows.step)  # fmt: skip
    for r in range(rows.length - twos, rows.length, 2):
        value_tile(form, 2, columns, at, count, offset, rows.width, first, weights + r * step,
                   step, sums + r * rows.step, rows.step)  # fmt: skip


@inlined
def _accumulate(
    form: int, plane: Plane, rows: _Rows, at: int, count: int, weights: int, sums: int
) -> None:
    """Add the values at `count` addresses to the sums of all rows."""
    vectors = rows.step // (4 * LANES)
    wide = vectors - vectors % COLUMNS
    batch = min(max(_BATCH_BYTES // (plane.kv_heads * plane.unit_bytes) // KEYS, 1), 4) * KEYS
    for j in range(0, count, batch):
        keys, units = min(batch, count - j), at + 8 * j
        for h in range(plane.kv_heads):
            offset = h * plane.head_bytes
            weight = weights + h * rows.length * _SCORES_STEP + 4 * j
            total = sums + h * rows.length * rows.step
            for i in range(0, keys, KEYS):
                ask_for_keys(units + 8 * (AHEAD + i), offset, plane.unit_bytes)
            for v in range(0, wide, COLUMNS):
                _add_values(form, COLUMNS, rows, units, keys, offset, v, weight, total)
            for v in range(wide, vectors):
                _add_values(form, 1, rows, units, keys, offset, v, weight, total)


@inlined
def _spread_queries(
    rows: _Rows, queries: int, tokens: int, heads: int, group: int, out: int
) -> None:
    """Queries [tokens, H, D] as rows; those that no query has are zeros."""
    scale = np.float32(1.0 / np.sqrt(rows.width))
    fill(out, 0, heads // group * rows.length * rows.step)
    for t in range(tokens):
        for head in range(heads):
            r = head // group * rows.length + t * group + head % group
            asked = queries + 4 * (t * heads + head) * rows.width
            spread_head(asked, rows.width, out + r * rows.step, scale)


@inlined
def _bound_rows(split: _Split, rows: _Rows, sight: _Sight, count: int, scores: int) -> None:
    """Put out of sight what each of `count` rows does not see; before, cap what it sees."""
    vectors = (split.stop + LANES - 1) // LANES
    for r in range(count):
        # What a tile with only one row to do has besides, does not matter.
        end = sight.end + r % rows.length // sight.group - split.base
        start, stop = max(end - sight.window, 0), max(min(end, split.stop), 0)
        row = scores + r * _SCORES_STEP
        if sight.cap < np.inf:
            cap_scores(row, vectors, sight.cap)
        if start > 0 or stop < vectors * LANES:
            bound_row(row, vectors, min(start, SPLIT), stop)


@inlined
def _weigh(vectors: int, count: int, scores: int, state: int, found: int) -> None:
    """Turn the scores of `count` rows into weights; maxima, then sums of weights go to `found`."""
    for r in range(0, count, _ROWS):
        for i in range(_ROWS):
            put_float32(state + 4 * i, np.float32(LOWEST))
            put_float32(state + TOTALS + 4 * i, np.float32(0))
        weigh_rows(_ROWS, scores + r * _SCORES_STEP, _SCORES_STEP, vectors, state)
        for i in range(min(_ROWS, count - r)):
            put_float32(found + 4 * (r + i), float32_at(state + 4 * i))
            put_float32(found + 4 * (count + r + i), float32_at(state + TOTALS + 4 * i))


@inlined
def _combine(
    partials: _Partials, rows: _Rows, group: int, heads: int, tokens: int, out: int
) -> None:
    """out [tokens, H, D] = the average over all splits."""
    for head in range(heads):
        for t in range(tokens):
            r = head // group * rows.length + t * group + head % group
            maxima = partials.begin + partials.maxima + 4 * r
            totals = partials.begin + partials.totals + 4 * r
            top, total = np.float32(LOWEST), np.float32(0)
            for n in range(partials.parts):
                top = max(top, float32_at(maxima + n * partials.step))
            for n in range(partials.parts):
                weight = shrinkage(float32_at(maxima + n * partials.step), top)
                total += float32_at(totals + n * partials.step) * weight
            sums, place = partials.begin + r * rows.step, out + 4 * (t * heads + head) * rows.width
            for n in range(partials.parts):
                factor = shrinkage(float32_at(maxima + n * partials.step), top) / total
                gather_head(sums + n * partials.step, rows.width, place, n, factor)


@cache
def decode_part(form: int) -> Task:
    """The part of a shared work that is one item, for units of this form (`vectors.FORMS`).

    An item: the first of its tokens (a row of queries [T, H, D] and out), how many, where their
    sequence's pages begin, the position of the first token, the split, and where the partials of
    their sequence begin, in units of `partial_size` of all KV heads. Of counters
    [T, COUNTER_WORDS], zeros before and after, the first token's counts the splits done.
    """

    @task
    def part(arguments: int, index: int) -> int:
        (
            queries, keys, values, out, items, pages, partials, counters, heads,
            cap_at, window, width, page_size, kv_heads, token_step, head_step, unit_bytes,
        ) = words_at(arguments, ARGUMENTS)  # fmt: skip
        token, tokens, first_page, position, number, partials_start = words_at(
            items + 8 * ITEM * index, ITEM
        )
        plane = Plane(
            keys, values, pages + 4 * first_page, page_size,
            page_size * kv_heads * unit_bytes, token_step * unit_bytes, head_step * unit_bytes,
            unit_bytes, kv_heads,
        )  # fmt: skip
        group, cap = heads // kv_heads, float32_at(cap_at)
        vectors = (width + LANES - 1) // LANES
        rows = _Rows(max(2, tokens * group), width, 4 * LANES * vectors)
        all_rows = kv_heads * rows.length
        base = number * SPLIT
        first = max(position + 1 - window - base, 0)
        split = _Split(base, first - first % KEYS, first, min(position + tokens - base, SPLIT))

        padded_rows = (all_rows + _ROWS - 1) // _ROWS * _ROWS
        query = take_lines(padded_rows * (rows.step + _SCORES_STEP) + STATE_BYTES
                           + 8 * 2 * (SPLIT + AHEAD + KEYS))  # fmt: skip
        scores = query + padded_rows * rows.step
        state = scores + padded_rows * _SCORES_STEP
        addresses = state + STATE_BYTES
        whole = _find_addresses(plane, split, addresses)
        _ask_for_first(plane, addresses, whole)
        asked = queries + 4 * token * heads * width
        _spread_queries(rows, asked, tokens, heads, group, query)
        _score(form, plane, rows, query, addresses, whole, scores + 4 * split.begin)
        sight = _Sight(position + 1, window, group, cap)
        _bound_rows(split, rows, sight, all_rows, scores)

        first_split = max(position + 1 - window, 0) // SPLIT
        splits = (position + tokens - 1) // SPLIT + 1 - first_split
        maxima = all_rows * rows.step
        begin = partials + partials_start * kv_heads * max(2, group) * (rows.step + 8)
        found = _Partials(begin, splits, maxima + 8 * all_rows, maxima, maxima + 4 * all_rows)
        mine = begin + (number - first_split) * found.step
        fill(mine, 0, maxima)
        score_vectors = (split.stop + LANES - 1) // LANES
        _weigh(score_vectors, all_rows, scores, state, mine + maxima)
        seen = split.first - split.begin
        _accumulate(form, plane, rows, addresses + 8 * (whole + seen),
                    split.stop - split.first, scores + 4 * split.first, mine)  # fmt: skip
        give_back_lines(query)

        counter = counters + 8 * COUNTER_WORDS * token
        if add(counter, 1) == splits - 1:
            store(counter, 0)
            place = out + 4 * token * heads * width
            _combine(found, rows, group, heads, tokens, place)
        return 0

    return part
