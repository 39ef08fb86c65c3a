"""Products of many inputs, by a crew: each part packs some rows of the weight for itself.

Packing costs what a few inputs cost, so that it pays where there are many; sums across registers
are saved. Shapes as in `operators.interface`; arrays are float32 at addresses.
"""

from __future__ import annotations

import numpy as np

from engine.instructions import LANES
from engine.native_math import inlined, task
from engine.native_memory import array_at, words_at
from engine.operators.panel_tile import PANEL_ROWS, pack_square, panel_tile
from engine.scratch import give_back, take

_INPUTS = 6
"""Of a tile: twelve sums, a line of the panel and an input fill the sixteen registers of AVX2."""
_tile, _tile_of_2, _tile_of_1 = (panel_tile(n) for n in (_INPUTS, 2, 1))
_SPAN_MAX = 384
"""Elements of a panel that are multiplied before the next ones: 24 KiB, which stay in L1."""
_NEAR_TOKENS = 96
"""Inputs that are multiplied by all panels of a part while they are in L2."""
PART_ROWS = 2 * PANEL_ROWS
"""Of a weight in one part of the work."""


@inlined
def _pack(weight: int, rows: int, width: int, panel: int) -> None:
    """Up to 16 neighbouring rows to a panel; where there are fewer, zeros."""
    whole = width - width % LANES
    for side in range(0, PANEL_ROWS, LANES):
        place, first = panel + 4 * side, weight + 4 * side * width
        if side + LANES <= rows:
            for k in range(0, whole, LANES):
                pack_square(first + 4 * k, width, place + 4 * k * PANEL_ROWS)
    packed = rows - rows % LANES
    elements = array_at(weight, (rows, width), np.float32)
    lines = array_at(panel, (width, PANEL_ROWS), np.float32)
    for k in range(whole, width):
        for n in range(packed):
            lines[k, n] = elements[n, k]
    for k in range(width):
        for n in range(packed, rows):
            lines[k, n] = elements[n, k]
        for n in range(rows, PANEL_ROWS):
            lines[k, n] = 0


@inlined
def _multiply_span(  # noqa: PLR0913  # a tile's arguments, and of how many inputs
    lines: int, x: int, tokens: int, width: int, count: int, out: int, out_step: int, adds: int
) -> None:
    """Some elements of a panel and of the inputs."""
    sixes, twos = tokens - tokens % _INPUTS, tokens - tokens % 2
    for t in range(0, sixes, _INPUTS):
        place = out + 4 * t * out_step
        _tile(lines, x + 4 * t * width, width, count, place, out_step, adds)
    for t in range(sixes, twos, 2):
        place = out + 4 * t * out_step
        _tile_of_2(lines, x + 4 * t * width, width, count, place, out_step, adds)
    if twos < tokens:
        place = out + 4 * twos * out_step
        _tile_of_1(lines, x + 4 * twos * width, width, count, place, out_step, adds)


@inlined
def _multiply(
    panels: int, number: int, inputs: int, tokens: int, width: int, out: int, out_step: int
) -> None:
    """out[t, n] = panels[:, n] . inputs[t] for t < tokens and the rows n of so many panels."""
    spans = (width + _SPAN_MAX - 1) // _SPAN_MAX
    span = (width + spans - 1) // spans
    for start in range(0, width, span):
        count = min(span, width - start)
        for t in range(0, tokens, _NEAR_TOKENS):
            near, x = min(_NEAR_TOKENS, tokens - t), inputs + 4 * (t * width + start)
            for p in range(number):
                lines = panels + 4 * (p * width + start) * PANEL_ROWS
                place = out + 4 * (t * out_step + p * PANEL_ROWS)
                _multiply_span(lines, x, near, width, count, place, out_step, start)


@inlined
def multiply_rows(
    weight: int, rows: int, inputs: int, tokens: int, width: int, out: int, out_step: int
) -> None:
    """out[t, n] = weight[n] . inputs[t] for t < tokens and n < rows."""
    packed = take(4 * width * ((rows + PANEL_ROWS - 1) // PANEL_ROWS * PANEL_ROWS))
    for n in range(0, rows, PANEL_ROWS):
        count = min(PANEL_ROWS, rows - n)
        _pack(weight + 4 * n * width, count, width, packed + 4 * n * width)
    whole = rows // PANEL_ROWS
    _multiply(packed, whole, inputs, tokens, width, out, out_step)
    done = whole * PANEL_ROWS
    if done < rows:
        found = take(4 * tokens * PANEL_ROWS)
        _multiply(packed + 4 * done * width, 1, inputs, tokens, width, found, PANEL_ROWS)
        products = array_at(found, (tokens, PANEL_ROWS), np.float32)
        for t in range(tokens):
            result = array_at(out + 4 * (t * out_step + done), rows - done, np.float32)
            for n in range(rows - done):
                result[n] = products[t, n]
        give_back(found)
    give_back(packed)


@task
def linear_part(arguments: int, index: int) -> int:
    """out [tokens, rows] = inputs [tokens, width] . weight [rows, width]^T."""
    inputs, weight, out, tokens, width, rows = words_at(arguments, 6)
    start = index * PART_ROWS
    count = min(PART_ROWS, rows - start)
    row, place = weight + 4 * start * width, out + 4 * start
    multiply_rows(row, count, inputs, tokens, width, place, rows)
    return 0
