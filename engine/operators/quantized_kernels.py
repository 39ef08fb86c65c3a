"""Products with a `QuantizedWeight`, by a crew. Shapes as in `operators.interface`.

A few rows become float32 in the nearest cache, and are multiplied by every input while they are
there: memory gives eight bits per element, and the sums are those of `native_kernels`.
"""

from __future__ import annotations

import numpy as np

from engine.instructions import LANES
from engine.native_math import inlined, task
from engine.native_memory import array_at, words_at
from engine.operators.group_tile import group_dot, group_elements
from engine.operators.native_kernels import (
    BLOCK_TOKENS,
    ROWS,
    multiply_row,
    multiply_rows,
    tiles_of,
)
from engine.operators.panel_kernels import multiply_rows as multiply_packed
from engine.operators.quantized_weight import GROUP
from engine.scratch import give_back, take


@inlined
def _elements(values: int, scale: float, count: int, out: int) -> None:
    """Those of one group, or of a part of it, go to `out`."""
    found, elements = array_at(values, count, np.int8), array_at(out, count, np.float32)
    for k in range(count):
        elements[k] = np.float32(found[k]) * scale


@inlined
def _element_rows(values: int, scales: int, rows: int, width: int, out: int) -> None:
    """The elements of neighbouring rows, to the address `out`."""
    groups = (width + GROUP - 1) // GROUP
    whole = width // GROUP
    for n in range(rows):
        row, of_groups = values + n * width, array_at(scales + 4 * n * groups, groups, np.float32)
        place = out + 4 * n * width
        group_elements(row, scales + 4 * n * groups, whole, place)
        if whole < groups:
            done = whole * GROUP
            _elements(row + done, of_groups[whole], width - done, place + 4 * done)


@inlined
def _dot(values: int, scales: int, inputs: int, width: int) -> np.float32:
    """A row's product with one input: the sum of its groups', each scaled once."""
    groups = (width + GROUP - 1) // GROUP
    whole = width // GROUP
    of_groups = array_at(scales, groups, np.float32)
    total: np.float32 = group_dot(values, scales, whole, inputs)
    if whole < groups:
        done = whole * GROUP
        total += _sum(values + done, inputs + 4 * done, width - done) * of_groups[whole]
    return total


@inlined
def _sum(values: int, inputs: int, count: int) -> np.float32:
    found, x = array_at(values, count, np.int8), array_at(inputs, count, np.float32)
    total = np.float32(0)
    for k in range(count):
        total += np.float32(found[k]) * x[k]
    return total


@inlined
def _multiply(  # noqa: PLR0913  # as a float32 product, and scales
    inputs: int,
    values: int,
    scales: int,
    out: int,
    tokens: int,
    width: int,
    rows: int,
    out_step: int,
) -> None:
    """out[t, n] = inputs[t] . elements[n] for t < tokens, n < rows."""
    groups = (width + GROUP - 1) // GROUP
    row = take(4 * ROWS * width)
    # All tiles of these rows together ask for the values of the next rows, once.
    step = LANES * ROWS // tiles_of(tokens)
    for n in range(0, rows, ROWS):
        count = min(ROWS, rows - n)
        found, place = values + n * width, out + 4 * n
        _element_rows(found, scales + 4 * n * groups, count, width, row)
        if count == ROWS:
            ahead = found + ROWS * width
            multiply_rows(row, inputs, place, tokens, width, out_step, ahead, step)
        else:
            for i in range(count):
                multiply_row(row + 4 * i * width, inputs, place + 4 * i, tokens, width, out_step)
    give_back(row)


@task
def linear_part(arguments: int, index: int) -> int:
    """out [tokens, rows] = inputs [tokens, width] . elements [rows, width]^T."""
    inputs, values, scales, out, tokens, width, rows, part_rows = words_at(arguments, 8)
    groups = (width + GROUP - 1) // GROUP
    start = index * part_rows
    count = min(part_rows, rows - start)
    values += start * width
    scales += 4 * start * groups
    out += 4 * start
    if tokens == 1:
        result = array_at(out, count, np.float32)
        for n in range(count):
            result[n] = _dot(values + n * width, scales + 4 * n * groups, inputs, width)
        return 0
    for t in range(0, tokens, BLOCK_TOKENS):
        _multiply(
            inputs + 4 * t * width,
            values,
            scales,
            out + 4 * t * rows,
            min(BLOCK_TOKENS, tokens - t),
            width,
            count,
            rows,
        )
    return 0


@task
def packed_part(arguments: int, index: int) -> int:
    """As `linear_part`, for many inputs, see `panel_kernels`."""
    inputs, values, scales, out, tokens, width, rows, part_rows = words_at(arguments, 8)
    groups = (width + GROUP - 1) // GROUP
    start = index * part_rows
    count = min(part_rows, rows - start)
    row = take(4 * count * width)
    _element_rows(values + start * width, scales + 4 * start * groups, count, width, row)
    multiply_packed(row, count, inputs, tokens, width, out + 4 * start, rows)
    give_back(row)
    return 0
