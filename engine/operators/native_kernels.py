"""Products of float32, by a crew. Shapes as in `operators.interface`."""

from __future__ import annotations

import numpy as np

from engine.instructions import LANES
from engine.native_math import F32, inlined, task
from engine.native_memory import array_at, words_at
from engine.operators.dot_tile import dot_tile

ROWS, _INPUTS = 3, 4
"""Of a tile: twelve sums, three rows and an input fill the sixteen registers of AVX2."""
_tile, _tile_of_3, _tile_of_2, _tile_of_1 = (dot_tile(ROWS, n) for n in (_INPUTS, 3, 2, 1))
_single = dot_tile(1, 1)
DOT_TOKENS_MAX = 128
"""For more of them `panel_kernels` is faster. Sums differ in their order, so that the limit is
what a step has at most by default: in chunks of 2 to 128 tokens, a token's K and V are the same."""
BLOCK_TOKENS = 64
"""Inputs multiplied by a part of the weight before the next ones: together they stay in L2."""
PART_ELEMENTS = 32 * 1024
"""Of a weight in one part of the work: long enough a stream for the memory, short enough that
threads end together."""


@inlined
def _dot(row: F32, x: F32) -> np.float32:
    """One stream through a weight is what memory likes best."""
    total = np.float32(0)
    for k in range(len(row)):
        total += row[k] * x[k]
    return total


@inlined
def multiply_rows(  # noqa: PLR0913  # a tile's arguments, and how far they go
    row: int, inputs: int, out: int, tokens: int, width: int, out_step: int, ahead: int, step: int
) -> None:
    """out[t, n] = inputs[t] . row[n] for t < tokens and `ROWS` rows; see `dot_tile`."""
    for t in range(0, tokens, _INPUTS):
        x, place, left = inputs + 4 * t * width, out + 4 * t * out_step, tokens - t
        if left >= _INPUTS:
            _tile(row, x, width, place, out_step, ahead, step)
        elif left == 3:
            _tile_of_3(row, x, width, place, out_step, ahead, step)
        elif left == 2:
            _tile_of_2(row, x, width, place, out_step, ahead, step)
        else:
            _tile_of_1(row, x, width, place, out_step, ahead, step)
        ahead += step * (width // LANES)


@inlined
def multiply_row(row: int, inputs: int, out: int, tokens: int, width: int, out_step: int) -> None:
    """As `multiply_rows`, of a single row; nothing is asked for."""
    for t in range(tokens):
        _single(row, inputs + 4 * t * width, width, out + 4 * t * out_step, out_step, row, 0)


@inlined
def tiles_of(tokens: int) -> int:
    """How many tiles `multiply_rows` computes."""
    return (tokens + _INPUTS - 1) // _INPUTS


@inlined
def _multiply(
    inputs: int, weight: int, out: int, tokens: int, width: int, rows: int, out_step: int
) -> None:
    """out[t, n] = inputs[t] . weight[n] for t < tokens, n < rows."""
    row_bytes = 4 * width
    whole = rows - rows % ROWS
    # All tiles of these rows together ask for the next rows, once.
    step = 4 * LANES * ROWS // tiles_of(tokens)
    for n in range(0, whole, ROWS):
        row = weight + n * row_bytes
        ahead = row + ROWS * row_bytes
        multiply_rows(row, inputs, out + 4 * n, tokens, width, out_step, ahead, step)
    for n in range(whole, rows):
        multiply_row(weight + n * row_bytes, inputs, out + 4 * n, tokens, width, out_step)


@task
def linear_part(arguments: int, index: int) -> int:
    """out [tokens, rows] = inputs [tokens, width] . weight [rows, width]^T."""
    inputs, weight, out, tokens, width, rows, part_rows = words_at(arguments, 7)
    start = index * part_rows
    count = min(part_rows, rows - start)
    if tokens == 1:
        x = array_at(inputs, width, np.float32)
        part = array_at(weight + 4 * start * width, (count, width), np.float32)
        result = array_at(out + 4 * start, count, np.float32)
        for n in range(count):
            result[n] = _dot(part[n], x)
        return 0
    for t in range(0, tokens, BLOCK_TOKENS):
        _multiply(
            inputs + 4 * t * width,
            weight + 4 * start * width,
            out + 4 * (t * rows + start),
            min(BLOCK_TOKENS, tokens - t),
            width,
            count,
            rows,
        )
    return 0


def rows_of_part(width: int) -> int:
    """Of a weight in one part of the work."""
    return max(1, PART_ELEMENTS // (width * ROWS)) * ROWS
