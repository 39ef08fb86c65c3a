"""Attention of a few new tokens per sequence, over KV of any element type, read where it lies.

A part of the work is `SPLIT` positions of one sequence, for all its heads: the KV of neighbouring
tokens is then read as one stream, once for all query heads of a KV head and all new tokens. Whoever
does the last part of a sequence combines them (flash-decoding: Dao et al. 2023). Splits lie at
multiples of `SPLIT`, and each query head of a token is summed in an order of its own: no bit
depends on the number of threads, on the batch, or on how many tokens of a sequence are new.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from engine.attention.heads import LOWEST, Plane, find_units, gather_sum, spread
from engine.attention.tiles import (
    AHEAD,
    COLUMNS,
    KEYS,
    ask_for_keys,
    cap_scores,
    highest_of,
    score_tile,
    shrinkage,
    value_tile,
    weigh,
)
from engine.instructions import LANES
from engine.native_math import F32, I64, Task, inlined, task
from engine.native_memory import add, address_of, array_at, keep, store

SPLIT = 128
"""Positions of one part of the work."""
_BATCH_BYTES = 16 * 1024
"""Of tokens whose values are summed before the next tokens': about what the nearest cache holds."""
ARGUMENTS, ITEM = 18, 6
"""Numbers of the work and of one of its items, see `decode_part`."""
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


def partial_size(group: int, width: int) -> int:
    """Most float32 that a part leaves per KV head and token: sums, maximum and weight of rows."""
    return max(2, group) * (-(-width // LANES) * LANES + 2)


@inlined
def _find_addresses(plane: Plane, split: _Split, addresses: I64) -> int:
    """Addresses of head 0 of the tokens' K, in whole tiles, of their V, and of more to look ahead.

    Returns how many there are of K.
    """
    count = split.stop - split.begin
    find_units(plane, split.base + split.begin, addresses[:count])
    whole = (count + KEYS - 1) // KEYS * KEYS
    last = addresses[count - 1]
    addresses[whole + count : whole + count + AHEAD + KEYS] = plane.values + last
    for j in range(count):
        addresses[whole + j] = plane.values + addresses[j]
        addresses[j] += plane.keys
    for j in range(count, whole):
        addresses[j] = plane.keys + last
    return whole


@inlined
def _score(form: int, plane: Plane, rows: _Rows, query: int, addresses: I64, scores: int) -> None:
    """Scores of all rows with the keys at `addresses`, in tiles."""
    at, step = address_of(addresses), 4 * SPLIT
    twos = 2 * (-rows.length % 3)
    for j in range(0, len(addresses), KEYS):
        for h in range(plane.kv_heads):
            offset = h * plane.head_bytes
            ask_for_keys(at + 8 * j, offset, plane.unit_bytes)
            asked, score = (
                query + h * rows.length * rows.step,
                scores + h * rows.length * step + 4 * j,
            )
            for r in range(0, rows.length - twos, 3):
                score_tile(form, 3, asked + r * rows.step, rows.step, at + 8 * j, offset,
                           rows.width, score + r * step, step)  # fmt: skip
            for r in range(rows.length - twos, rows.length, 2):
                score_tile(form, 2, asked + r * rows.step, rows.step, at + 8 * j, offset,
                           rows.width, score + r * step, step)  # fmt: skip


@inlined
def _weigh_row(scores: int, start: int, stop: int, vectors: int, cap: float) -> Any:
    """Turn vectors of scores of a row into weights, 0 outside [start, stop). Maximum and sum."""
    row = array_at(scores, vectors * LANES, np.float32)
    if start >= stop:
        row[:] = np.float32(0)
        return LOWEST, np.float32(0)
    if cap < np.inf:
        cap_scores(scores, vectors, cap)
    row[:start] = LOWEST
    row[stop:] = LOWEST
    highest = highest_of(scores, vectors, LOWEST)
    return highest, weigh(scores, vectors, highest)


@inlined
def _add_values(  # noqa: PLR0913
    form: int, columns: int, rows: _Rows, at: int, count: int, offset: int, first: int,
    weights: int, sums: int,
) -> None:  # fmt: skip
    """Add `columns` vectors of one head's values to the sums of all its rows."""
    step = 4 * SPLIT
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
            weight = weights + h * rows.length * 4 * SPLIT + 4 * j
            total = sums + h * rows.length * rows.step
            for i in range(0, keys, KEYS):
                ask_for_keys(units + 8 * i, offset, plane.unit_bytes)
            for v in range(0, wide, COLUMNS):
                _add_values(form, COLUMNS, rows, units, keys, offset, v, weight, total)
            for v in range(wide, vectors):
                _add_values(form, 1, rows, units, keys, offset, v, weight, total)


@inlined
def _combine(partials: F32, all_rows: int, rows: _Rows, group: int, out: F32) -> None:
    """out [tokens, H, D] = the average over all splits of partials [splits, `partial_size`]."""
    tokens, heads, _ = out.shape
    splits, size = partials.shape
    step = rows.step // 4
    out[:] = np.float32(0)
    for head in range(heads):
        for t in range(tokens):
            r = head // group * rows.length + t * group + head % group
            highest, totals = partials[:, size - 2 * all_rows + r], partials[:, size - all_rows + r]
            top, total = LOWEST, np.float32(0)
            for split in range(splits):
                top = max(top, highest[split])
            for split in range(splits):
                total += totals[split] * shrinkage(highest[split], top)
            for split in range(splits):
                factor = shrinkage(highest[split], top) / total
                gather_sum(partials[split, r * step : (r + 1) * step], factor, out[t, head])


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
            queries, keys, values, out, items, pages, pages_count, partials, counters, heads,
            cap_at, window, width, page_size, kv_heads, token_step, head_step, unit_bytes,
        ) = array_at(arguments, ARGUMENTS, np.int64)  # fmt: skip
        token, tokens, first_page, position, number, partials_start = array_at(
            items + 8 * ITEM * index, ITEM, np.int64
        )
        cap = array_at(cap_at, 1, np.float32)[0]
        plane = Plane(
            keys, values, pages + 4 * first_page, pages_count - first_page, page_size,
            page_size * kv_heads * unit_bytes, token_step * unit_bytes, head_step * unit_bytes,
            unit_bytes, kv_heads,
        )  # fmt: skip
        group = heads // kv_heads
        vectors = (width + LANES - 1) // LANES
        rows = _Rows(max(2, tokens * group), width, 4 * LANES * vectors)
        all_rows = kv_heads * rows.length
        base = number * SPLIT
        first = max(position + 1 - window - base, 0)
        split = _Split(base, first - first % KEYS, first, min(position + tokens - base, SPLIT))

        query = np.zeros((all_rows, LANES * vectors), dtype=np.float32)
        scale = np.float32(1.0 / np.sqrt(width))
        shape = (tokens, heads, width)
        asked = array_at(queries + 4 * token * heads * width, shape, np.float32)
        for t in range(tokens):
            for head in range(heads):
                r = head // group * rows.length + t * group + head % group
                spread(asked[t, head], scale, query[r])
        addresses = np.empty(2 * SPLIT + 2 * AHEAD, dtype=np.int64)
        whole = _find_addresses(plane, split, addresses)
        scores = np.empty((all_rows, SPLIT), dtype=np.float32)
        _score(form, plane, rows, address_of(query), addresses[:whole],
               address_of(scores) + 4 * split.begin)  # fmt: skip

        first_split = max(position + 1 - window, 0) // SPLIT
        splits = (position + tokens - 1) // SPLIT + 1 - first_split
        size = all_rows * (LANES * vectors + 2)
        start = partials_start * kv_heads * max(2, group) * (LANES * vectors + 2)
        all_partials = array_at(partials + 4 * start, (splits, size), np.float32)
        mine = all_partials[number - first_split]
        mine[: size - 2 * all_rows] = np.float32(0)
        for r in range(all_rows):
            # What a tile with only one row to do has besides, does not matter.
            t = r % rows.length // group
            highest, total = _weigh_row(
                address_of(scores) + 4 * SPLIT * r,
                max(position + t + 1 - window - base, 0),
                min(position + t + 1 - base, split.stop),
                (split.stop + LANES - 1) // LANES,
                cap,
            )
            mine[size - 2 * all_rows + r], mine[size - all_rows + r] = highest, total
        seen = split.first - split.begin
        _accumulate(form, plane, rows, address_of(addresses) + 8 * (whole + seen),
                    split.stop - split.first, address_of(scores) + 4 * split.first,
                    address_of(mine))  # fmt: skip
        keep(query)
        keep(addresses)
        keep(scores)

        counter = counters + 8 * COUNTER_WORDS * token
        if add(counter, 1) == splits - 1:
            store(counter, 0)
            averaged = array_at(out + 4 * token * heads * width, shape, np.float32)
            _combine(all_partials, all_rows, rows, group, averaged)
        return 0

    return part
