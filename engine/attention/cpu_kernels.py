"""Decode attention on a CPU: each query reads its pages where they lie. Compiled once, cached.

One row is one query token. Keys are taken a tile at a time with a running softmax (Milakov and
Gimelshein, arXiv:1805.02867), so the scratch memory is bounded whatever the context. All heads are
done in one pass over a tile: the KV of neighbouring tokens is then read as one stream, K and V
once each, and KV heads are never expanded. Four keys at a time share the load of a query.
"""

from __future__ import annotations

import numpy as np

from engine.crew import share
from engine.native_math import F32, I32, I64, exp, inlined, kernel, task
from engine.native_memory import address_of, array_at

_TILE = 128
"""Keys per tile. Longer K and V streams are better for the memory than scores that fit in L1."""
LOWEST = np.float32(-1e30)
"""Where a running maximum starts. Finite: differences with it must not be NaN."""
_UNROLL = 4


@inlined
def _find_slots(
    pages: I32, first_page: int, start: int, count: int, page_size: int, slots: I64
) -> None:
    for j in range(count):
        position = start + j
        page = pages[first_page + position // page_size]
        slots[j] = np.int64(page) * page_size + position % page_size


@inlined
def score(query: F32, keys: F32, slots: I64, count: int, scores: F32) -> None:
    """scores[h, g, j] = query[h, g] . keys[slots[j], h]."""
    kv_heads, group, head_dim = query.shape
    whole = count - count % _UNROLL
    for j in range(0, whole, _UNROLL):
        for h in range(kv_heads):
            key0, key1 = keys[slots[j], h], keys[slots[j + 1], h]
            key2, key3 = keys[slots[j + 2], h], keys[slots[j + 3], h]
            for g in range(group):
                dot0 = dot1 = dot2 = dot3 = np.float32(0)
                for d in range(head_dim):
                    x = query[h, g, d]
                    dot0 += x * key0[d]
                    dot1 += x * key1[d]
                    dot2 += x * key2[d]
                    dot3 += x * key3[d]
                scores[h, g, j], scores[h, g, j + 1] = dot0, dot1
                scores[h, g, j + 2], scores[h, g, j + 3] = dot2, dot3
    for j in range(whole, count):
        for h in range(kv_heads):
            key = keys[slots[j], h]
            for g in range(group):
                dot = np.float32(0)
                for d in range(head_dim):
                    dot += query[h, g, d] * key[d]
                scores[h, g, j] = dot


@inlined
def weigh(scores: F32, highest: F32, weight_sum: F32, sums: F32, row: int) -> None:
    """Turn the scores of a row into weights, and what was summed before to the new scale."""
    top = highest[row]
    for j in range(len(scores)):
        top = max(top, scores[j])
    total = np.float32(0)
    for j in range(len(scores)):
        weight = exp(scores[j] - top)
        scores[j] = weight
        total += weight
    shrink = exp(highest[row] - top)
    weight_sum[row] = weight_sum[row] * shrink + total
    highest[row] = top
    for d in range(sums.shape[1]):
        sums[row, d] *= shrink


@inlined
def accumulate(weights: F32, values: F32, slots: I64, count: int, sums: F32) -> None:
    """sums[h, g] += weights[h, g, j] * values[slots[j], h] over all j."""
    kv_heads, group, head_dim = sums.shape
    whole = count - count % _UNROLL
    for j in range(0, whole, _UNROLL):
        for h in range(kv_heads):
            value0, value1 = values[slots[j], h], values[slots[j + 1], h]
            value2, value3 = values[slots[j + 2], h], values[slots[j + 3], h]
            for g in range(group):
                w0, w1 = weights[h, g, j], weights[h, g, j + 1]
                w2, w3 = weights[h, g, j + 2], weights[h, g, j + 3]
                for d in range(head_dim):
                    first = w0 * value0[d] + w1 * value1[d]
                    sums[h, g, d] += first + w2 * value2[d] + w3 * value3[d]
    for j in range(whole, count):
        for h in range(kv_heads):
            value = values[slots[j], h]
            for g in range(group):
                for d in range(head_dim):
                    sums[h, g, d] += weights[h, g, j] * value[d]


@kernel
def _attend_rows(  # noqa: PLR0913
    queries: F32, keys: F32, values: F32, out: F32, rows: I64,
    pages: I32, page_size: int, start_row: int, stop_row: int,
) -> None:  # fmt: skip
    _, kv_heads, head_dim = keys.shape
    group = queries.shape[1] // kv_heads
    scale = np.float32(1.0 / np.sqrt(head_dim))
    slots = np.empty(_TILE, dtype=np.int64)
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
            _find_slots(pages, first_page, start, count, page_size, slots)
            score(query, keys, slots, count, scores)
            for h in range(kv_heads):
                for g in range(group):
                    weigh(scores[h, g, :count], highest[h], weight_sum[h], sums[h], g)
            accumulate(scores, values, slots, count, sums)
        for h in range(kv_heads):
            for g in range(group):
                out[token, h * group + g] = sums[h, g] / weight_sum[h, g]


@task
def _attend_part(arguments: int, index: int) -> int:
    (
        queries, tokens, heads, head_dim, keys, slots, kv_heads, values, out, rows, count, pages,
        pages_count, page_size,
    ) = array_at(arguments, 14, np.int64)  # fmt: skip
    shape, pool = (tokens, heads, head_dim), (slots, kv_heads, head_dim)
    _attend_rows(
        array_at(queries, shape, np.float32),
        array_at(keys, pool, np.float32),
        array_at(values, pool, np.float32),
        array_at(out, shape, np.float32),
        array_at(rows, (count, 4), np.int64),
        array_at(pages, pages_count, np.int32),
        page_size,
        index,
        index + 1,
    )
    return 0


@kernel
def _attend(  # noqa: PLR0913
    board: int, part: int, queries: F32, keys: F32, values: F32, out: F32, rows: I64,
    pages: I32, page_size: int,
) -> None:  # fmt: skip
    tokens, heads, head_dim = queries.shape
    slots, kv_heads, _ = keys.shape
    arguments = np.array([
        address_of(queries), tokens, heads, head_dim, address_of(keys), slots, kv_heads,
        address_of(values), address_of(out), address_of(rows), len(rows), address_of(pages),
        len(pages), page_size,
    ])  # fmt: skip
    share(board, part, arguments, len(rows))


def decode_attention(  # noqa: PLR0913
    queries: F32, keys: F32, values: F32, out: F32, rows: I64,
    pages: I32, page_size: int, board: int,
) -> None:  # fmt: skip
    """Attention of some query tokens of queries [T, H, D] into the same rows of out [T, H, D].

    rows [n, 4]: the token (row of `queries`), the index in `pages` of its sequence's first page,
    the first position it sees, and the one after the last. keys, values: one layer's pool
    [N_slot, H_kv, D]. Every array is contiguous. board: of the crew that shares the rows.
    """
    for array in (queries, keys, values, out, rows, pages):
        assert array.flags.c_contiguous, "parts of the work get its address"
    _attend(board, _attend_part.address, queries, keys, values, out, rows, pages, page_size)


@kernel
def weigh_tile(  # noqa: PLR0913
    scores: F32, highest: F32, weight_sum: F32, sums: F32,
    first_query: int, queries: int, first_key: int, window: int,
) -> None:  # fmt: skip
    """One step of the running softmax for a tile of queries and keys, causal and windowed.

    scores [H_kv, G * n, m] of n = `queries` tokens from position `first_query` on, and keys from
    position `first_key` on, become weights, 0 but for the last `window` keys up to their query's
    position. highest and weight_sum [H_kv, G * n] and sums [H_kv, G * n, D] are brought to the new
    scale.
    """
    kv_heads, rows, keys = scores.shape
    for h in range(kv_heads):
        for r in range(rows):
            stop = first_query + r % queries + 1 - first_key
            start = min(max(stop - window, 0), keys)
            stop = min(max(stop, 0), keys)
            scores[h, r, :start] = np.float32(0)
            scores[h, r, stop:] = np.float32(0)
            if start < stop:
                weigh(scores[h, r, start:stop], highest[h], weight_sum[h], sums[h], r)
