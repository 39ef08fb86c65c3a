"""The inner loops of attention, for kernels: each keeps all it sums in registers.

See `engine.attention.tile_functions` for their arguments. The first ones, `form` and `rows`, are
constants of the calling kernel; each value makes other machine code.

A head that is no whole number of vectors has its last vector overlap the one before: element
`min(LANES * v, width - LANES)` is where vector v begins, see `engine.attention.heads`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.attention.tile_functions import (
    FLOAT_BYTES,
    VECTOR_BYTES,
    WORD_BYTES,
    Emit,
    emitted,
    tile,
    vector_count,
)
from engine.attention.vectors import LINE, Units, Vectors
from engine.instructions import FLOAT, INT, LANES, SECOND_CACHE, VECTOR, integer, vector

if TYPE_CHECKING:
    from collections.abc import Callable

KEYS = 4
"""Keys of a tile of scores."""
COLUMNS = 4
"""Vectors of a wide tile of values."""
AHEAD = 16
"""How many keys ahead memory is asked for what comes next."""
BLOCK_ROWS = 6
"""Of a tile of products: twelve sums, two vectors and a number fill the registers of AVX2."""
PANEL = 2 * LANES
"""Its columns."""


@tile
def score_tile(  # noqa: PLR0913
    _: Any, form: Any, rows: Any, query: Any, query_step: Any, units: Any, offset: Any,
    width: Any, scores: Any, scores_step: Any,
) -> Emit:  # fmt: skip
    """scores[r, j] = query[r] . the unit at units[j] + offset, for j < KEYS."""
    constants = form, rows
    form, rows = (constant.literal_value for constant in constants)

    def emit(  # noqa: PLR0913
        code: Vectors, query: Any, query_step: Any, units: Any, offset: Any, width: Any,
        scores: Any, scores_step: Any,
    ) -> None:  # fmt: skip
        stored = Units(code, form)
        keys = [
            stored.open(
                code.plus(code.load(code.plus(units, integer(WORD_BYTES * j)), INT, 8), offset)
            )
            for j in range(KEYS)
        ]
        queries = [code.plus(query, query_step, r) for r in range(rows)]

        def add(at: Any, place: Any, sums: list[Any]) -> list[Any]:
            of_queries = [code.load(code.plus(q, place, FLOAT_BYTES), VECTOR) for q in queries]
            following = []
            for j in range(KEYS):
                key = stored.load(keys[j], at)
                following += [
                    code.multiply_add(of_queries[r], key, sums[j * rows + r]) for r in range(rows)
                ]
            return following

        def step(v: Any, sums: list[Any]) -> list[Any]:
            at = code.builder.mul(v, integer(LANES))
            return add(at, at, sums)

        whole = code.builder.sdiv(width, integer(LANES))
        sums = code.repeat(whole, [vector(0.0)] * (rows * KEYS), step)
        # What is left, if anything, is the last of a loop over all vectors.
        whole_elements = code.builder.mul(whole, integer(LANES))
        left = code.builder.sub(vector_count(code, width), whole)
        last = code.plus(width, integer(-LANES))
        sums = code.repeat(left, sums, lambda _, sums: add(last, whole_elements, sums))
        for r in range(rows):
            dots = code.four_sums(sums[r::rows])
            code.store(dots, code.plus(scores, scores_step, r))

    return emitted(constants, 7, emit)


@tile
def ask_for_keys(_: Any, units: Any, offset: Any, size: Any) -> Emit:
    """Ask memory for `size` bytes of each unit at units[j] + offset, for j < KEYS."""

    def emit(code: Vectors, units: Any, offset: Any, size: Any) -> None:
        words = [code.plus(units, integer(WORD_BYTES * j)) for j in range(KEYS)]
        asked = [code.plus(code.load(word, INT, 8), offset) for word in words]

        def step(line: Any, states: list[Any]) -> list[Any]:
            for unit in asked:
                # Not into the nearest: tokens may lie as far apart as its lines of one set do.
                code.ask(code.plus(unit, line, LINE), SECOND_CACHE)
            return states

        lines = code.builder.sdiv(code.plus(size, integer(LINE - 1)), integer(LINE))
        code.repeat(lines, [], step)

    return emitted((), 3, emit)


@tile
def value_tile(  # noqa: PLR0913
    _: Any, form: Any, rows: Any, columns: Any, units: Any, count: Any, offset: Any, width: Any,
    first: Any, weights: Any, weights_step: Any, sums: Any, sums_step: Any,
) -> Emit:  # fmt: skip
    """sums[r] += weights[r, j] * the unit at units[j] + offset, for j < count; vectors [first,
    first + columns) of them."""
    constants = form, rows, columns
    form, rows, columns = (constant.literal_value for constant in constants)

    def emit(  # noqa: PLR0913
        code: Vectors, units: Any, count: Any, offset: Any, width: Any, first: Any, weights: Any,
        weights_step: Any, sums: Any, sums_step: Any,
    ) -> None:  # fmt: skip
        stored = Units(code, form)
        last = code.plus(width, integer(-LANES))
        at = [
            code.least(code.builder.mul(code.plus(first, integer(v)), integer(LANES)), last)
            for v in range(columns)
        ]
        block = code.plus(sums, first, VECTOR_BYTES)
        places = [
            code.plus(code.plus(block, sums_step, r), integer(VECTOR_BYTES * v))
            for v in range(columns)
            for r in range(rows)
        ]
        of_rows = [code.plus(weights, weights_step, r) for r in range(rows)]

        def step(j: Any, totals: list[Any]) -> list[Any]:
            word = code.plus(units, j, WORD_BYTES)
            unit = stored.open(code.plus(code.load(word, INT, 8), offset))
            weight = [
                code.splat(code.load(code.plus(row, j, FLOAT_BYTES), FLOAT)) for row in of_rows
            ]
            following = []
            for v, position in enumerate(at):
                value = stored.load(unit, position)
                following += [
                    code.multiply_add(weight[r], value, totals[v * rows + r]) for r in range(rows)
                ]
            return following

        totals = code.repeat(count, [code.load(place, VECTOR) for place in places], step)
        for total, place in zip(totals, places, strict=True):
            code.store(total, place)

    return emitted(constants, 9, emit)


@tile
def product_tile(  # noqa: PLR0913
    _: Any, scaled: Any, a: Any, a_step: Any, b: Any, b_step: Any, count: Any, out: Any,
    out_step: Any, factors: Any,
) -> Emit:  # fmt: skip
    """out = a . b, and if `scaled`, plus out times the factor of each row.

    a [BLOCK_ROWS, count], b [count, PANEL], out [BLOCK_ROWS, PANEL], factors [BLOCK_ROWS].
    """
    constants = (scaled,)
    scaled = scaled.literal_value

    def emit(  # noqa: PLR0913
        code: Vectors, a: Any, a_step: Any, b: Any, b_step: Any, count: Any, out: Any,
        out_step: Any, factors: Any,
    ) -> None:  # fmt: skip
        of_rows = [code.plus(a, a_step, r) for r in range(BLOCK_ROWS)]
        places = [
            code.plus(code.plus(out, out_step, r), integer(VECTOR_BYTES * v))
            for r in range(BLOCK_ROWS)
            for v in range(2)
        ]
        starts = [vector(0.0)] * len(places)
        if scaled:
            factor = [
                code.splat(code.load(code.plus(factors, integer(FLOAT_BYTES * r)), FLOAT))
                for r in range(BLOCK_ROWS)
            ]
            starts = [
                code.builder.fmul(code.load(place, VECTOR), factor[n // 2])
                for n, place in enumerate(places)
            ]

        def step(k: Any, totals: list[Any]) -> list[Any]:
            row = code.plus(b, code.builder.mul(k, b_step))
            panel = [code.load(code.plus(row, integer(VECTOR_BYTES * v)), VECTOR) for v in range(2)]
            following = []
            for r in range(BLOCK_ROWS):
                number = code.splat(code.load(code.plus(of_rows[r], k, FLOAT_BYTES), FLOAT))
                following += [
                    code.multiply_add(number, panel[v], totals[2 * r + v]) for v in range(2)
                ]
            return following

        for total, place in zip(code.repeat(count, starts, step), places, strict=True):
            code.store(total, place)

    return emitted(constants, 8, emit)


@tile
def transpose_tile(
    _: Any, form: Any, units: Any, offset: Any, width: Any, out: Any, out_step: Any
) -> Emit:
    """out[d, j] = element d of the unit at units[j] + offset, for j < LANES and every d."""
    constants = (form,)
    form = form.literal_value

    def emit(code: Vectors, units: Any, offset: Any, width: Any, out: Any, out_step: Any) -> None:
        stored = Units(code, form)
        opened = [
            stored.open(
                code.plus(code.load(code.plus(units, integer(WORD_BYTES * j)), INT, 8), offset)
            )
            for j in range(LANES)
        ]
        last = code.plus(width, integer(-LANES))

        def step(v: Any, states: list[Any]) -> list[Any]:
            at = code.least(code.builder.mul(v, integer(LANES)), last)
            columns = code.transposed([stored.load(unit, at) for unit in opened])
            block = code.plus(out, code.builder.mul(v, out_step), LANES)
            for d, column in enumerate(columns):
                code.store(column, code.plus(block, out_step, d))
            return states

        code.repeat(vector_count(code, width), [], step)

    return emitted(constants, 5, emit)


@tile
def pack_unit(_: Any, form: Any, unit: Any, width: Any, out: Any, out_step: Any) -> Emit:
    """The elements of a unit as float32, PANEL at `out`, the next PANEL `out_step` bytes behind."""
    constants = (form,)
    form = form.literal_value

    def emit(code: Vectors, unit: Any, width: Any, out: Any, out_step: Any) -> None:
        stored = Units(code, form)
        opened = stored.open(unit)
        _pack(code, width, out, out_step, lambda at: stored.load(opened, at))

    return emitted(constants, 4, emit)


@tile
def clear_unit(_: Any, width: Any, out: Any, out_step: Any) -> Emit:
    """Zeros where `pack_unit` puts a unit."""

    def emit(code: Vectors, width: Any, out: Any, out_step: Any) -> None:
        _pack(code, width, out, out_step, lambda _: vector(0.0))

    return emitted((), 3, emit)


def _pack(
    code: Vectors, width: Any, out: Any, out_step: Any, element_vector: Callable[[Any], Any]
) -> None:
    """Store element_vector(first element) for each vector of a head, in panels."""
    last = code.plus(width, integer(-LANES))
    panels = PANEL // LANES

    def step(v: Any, states: list[Any]) -> list[Any]:
        panel = code.builder.mul(code.builder.udiv(v, integer(panels)), out_step)
        within = code.builder.urem(v, integer(panels))
        place = code.plus(code.plus(out, panel), within, VECTOR_BYTES)
        at = code.least(code.builder.mul(v, integer(LANES)), last)
        code.store(element_vector(at), place)
        return states

    code.repeat(vector_count(code, width), [], step)
