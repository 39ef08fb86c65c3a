"""Decode attention on a CPU: each query reads its pages where they lie. Compiled once, cached.

One work item is (query token, KV head): the query heads that share the KV head are computed
together, so K and V are read once and never expanded. Keys are taken a tile at a time with a running
softmax (Milakov and Gimelshein, arXiv:1805.02867), so the scratch memory of an item is bounded
whatever the context.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

_TILE = 128
"""Keys per tile: scores of a head group stay in L1, and the loop costs are spread."""
_LOWEST = np.float32(-1e30)
_LOG2E = np.float32(1.4426950408889634)
_LN2 = np.float32(0.6931471805599453)
_EXP_LOWEST = np.float32(-87.0)
"""exp of less is below the smallest normal float32."""
# Infinities never occur below, so everything is allowed but assuming that none are compared.
_FASTMATH = {"reassoc", "contract", "nsz", "arcp"}


@numba.njit(inline="always", fastmath=_FASTMATH)
def _exp(x: np.float32) -> np.float32:
    """e^x for x <= 0: 2^n from the exponent bits, times a Taylor polynomial of the rest.

    Unlike libm's, a loop over it becomes vector instructions. Relative error below 1e-6.
    """
    x = max(x, _EXP_LOWEST)
    n = np.floor(x * _LOG2E + np.float32(0.5))
    r = x - n * _LN2
    p = np.float32(1 / 5040)
    p = p * r + np.float32(1 / 720)
    p = p * r + np.float32(1 / 120)
    p = p * r + np.float32(1 / 24)
    p = p * r + np.float32(1 / 6)
    p = p * r + np.float32(1 / 2)
    p = p * r + np.float32(1)
    p = p * r + np.float32(1)
    bits = np.int32((np.int32(n) + 127) << 23)
    return p * bits.view(np.float32)


@numba.njit(inline="always")
def _tile_slots(pages, first_page, start, count, page_size, slots):  # type: ignore[no-untyped-def] # noqa: ANN
    for j in range(count):
        position = start + j
        page = position // page_size
        slots[j] = pages[first_page + page] * page_size + position % page_size


@numba.njit(inline="always", fastmath=_FASTMATH)
def _tile_scores(query, keys, head, slots, count, scores):  # type: ignore[no-untyped-def] # noqa: ANN
    group, head_dim = query.shape
    for j in range(count):
        key = keys[slots[j], head]
        for g in range(group):
            total = np.float32(0)
            for d in range(head_dim):
                total += query[g, d] * key[d]
            scores[g, j] = total


@numba.njit(inline="always", fastmath=_FASTMATH)
def _tile_softmax(scores, count, highest, weight_sum, sums, head_dim):  # type: ignore[no-untyped-def] # noqa: ANN
    for g in range(len(highest)):
        top = highest[g]
        for j in range(count):
            top = max(top, scores[g, j])
        shrink = _exp(highest[g] - top)
        total = np.float32(0)
        for j in range(count):
            weight = _exp(scores[g, j] - top)
            scores[g, j] = weight
            total += weight
        weight_sum[g] = weight_sum[g] * shrink + total
        highest[g] = top
        for d in range(head_dim):
            sums[g, d] *= shrink


@numba.njit(inline="always", fastmath=_FASTMATH)
def _tile_values(scores, values, head, slots, count, sums):  # type: ignore[no-untyped-def] # noqa: ANN
    group, head_dim = sums.shape
    whole = count - count % 4
    for j in range(0, whole, 4):
        value0 = values[slots[j], head]
        value1 = values[slots[j + 1], head]
        value2 = values[slots[j + 2], head]
        value3 = values[slots[j + 3], head]
        for g in range(group):
            w0, w1, w2, w3 = scores[g, j], scores[g, j + 1], scores[g, j + 2], scores[g, j + 3]
            for d in range(head_dim):
                sums[g, d] += w0 * value0[d] + w1 * value1[d] + w2 * value2[d] + w3 * value3[d]
    for j in range(whole, count):
        value = values[slots[j], head]
        for g in range(group):
            for d in range(head_dim):
                sums[g, d] += scores[g, j] * value[d]


@numba.njit(inline="always", fastmath=_FASTMATH)
def _item(queries, keys, values, out, token, head, pages, first_page, length, page_size, scale):  # type: ignore[no-untyped-def] # noqa: ANN
    num_heads, head_dim = queries.shape[1], queries.shape[2]
    group = num_heads // keys.shape[1]
    scores = np.empty((group, _TILE), dtype=np.float32)
    slots = np.empty(_TILE, dtype=np.int64)
    query = np.empty((group, head_dim), dtype=np.float32)
    sums = np.zeros((group, head_dim), dtype=np.float32)
    highest = np.full(group, _LOWEST, dtype=np.float32)
    weight_sum = np.zeros(group, dtype=np.float32)
    for g in range(group):
        for d in range(head_dim):
            query[g, d] = queries[token, head * group + g, d] * scale
    for start in range(0, length, _TILE):
        count = min(_TILE, length - start)
        _tile_slots(pages, first_page, start, count, page_size, slots)
        _tile_scores(query, keys, head, slots, count, scores)
        _tile_softmax(scores, count, highest, weight_sum, sums, head_dim)
        _tile_values(scores, values, head, slots, count, sums)
    for g in range(group):
        share = np.float32(1) / weight_sum[g]
        for d in range(head_dim):
            out[token, head * group + g, d] = sums[g, d] * share


@numba.njit(cache=True, nogil=True, fastmath=_FASTMATH)
def decode_attention(  # type: ignore[no-untyped-def] # noqa: ANN201, PLR0913
    queries: NDArray[np.float32],
    keys: NDArray[np.float32],
    values: NDArray[np.float32],
    out: NDArray[np.float32],
    tokens: NDArray[np.int64],
    first_pages: NDArray[np.int64],
    lengths: NDArray[np.int64],
    pages: NDArray[np.int32],
    page_size: int,
):
    """Attention of rows `tokens` of queries [T, H, D] into out [T, H, D].

    Row `tokens[i]` sees `lengths[i]` positions, whose pages begin at `pages[first_pages[i]]`.
    keys, values: [N_slot, H_kv, D].
    """
    scale = np.float32(1.0 / np.sqrt(queries.shape[2]))
    num_kv_heads = keys.shape[1]
    for row in range(len(tokens)):
        for head in range(num_kv_heads):
            _item(
                queries,
                keys,
                values,
                out,
                tokens[row],
                head,
                pages,
                first_pages[row],
                lengths[row],
                page_size,
                scale,
            )
