"""Tiles of attention over rows of scores, and over heads as they come and go.

Rows of a kernel's own memory are of whole vectors. A head that is no whole number of vectors has
its last vector overlap the one before, see `engine.attention.heads`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import types

from engine.attention.tile_functions import (
    FLOAT_BYTES,
    VECTOR_BYTES,
    Emit,
    emitted,
    tile,
    vector_count,
)
from engine.attention.vectors import Vectors
from engine.instructions import LANES, VECTOR, integer, vector

if TYPE_CHECKING:
    from collections.abc import Callable

LOWEST = -1e30
"""Where a running maximum starts. Finite: differences with it must not be NaN."""
_UNSEEN = 2 * LOWEST
"""A score that is out of sight: weighs nothing even if nothing is seen."""
STATE_BYTES = 3 * VECTOR_BYTES
"""Of what is known of up to `LANES` rows, see `weigh_rows`."""
TOTALS, FACTORS = VECTOR_BYTES, 2 * VECTOR_BYTES
"""Where in a state they begin."""
_ROWS_AT_ONCE = 3
"""Whose maxima and sums fit in the registers beside an exponential."""


@tile
def weigh_rows(_: Any, rows: Any, scores: Any, scores_step: Any, vectors: Any, state: Any) -> Emit:
    """Turn rows of scores into weights relative to each row's maximum, and keep account of it.

    state: maximum so far, sum of weights so far relative to it, and the factor that brings what
    was summed before this call to the new maximum; each of `LANES` rows. Rows of a tile are
    computed at the same time: each alone would wait for its own last instruction.
    """
    constants = (rows,)
    rows = rows.literal_value

    def emit(code: Vectors, scores: Any, scores_step: Any, vectors: Any, state: Any) -> None:
        builder = code.builder
        places = [code.plus(scores, scores_step, r) for r in range(rows)]
        at_totals, at_factors = (code.plus(state, integer(n)) for n in (TOTALS, FACTORS))

        def find(v: Any, highest: list[Any]) -> list[Any]:
            return [
                code.greatest(code.load(code.plus(place, v, VECTOR_BYTES), VECTOR), before)
                for place, before in zip(places, highest, strict=True)
            ]

        maxima = code.repeat(vectors, [vector(_UNSEEN)] * rows, find)
        before = code.load(state, VECTOR)
        top = code.greatest(_combined(code, maxima, code.greatest), before)
        factors = code.exponential(builder.fsub(before, top))
        code.store(top, state)
        code.store(factors, at_factors)

        sums: list[Any] = []
        for first in range(0, rows, _ROWS_AT_ONCE):
            some = places[first : first + _ROWS_AT_ONCE]
            tops = [code.spread(top, first + n) for n in range(len(some))]
            sums += code.repeat(vectors, [vector(0.0)] * len(some), _weighing(code, some, tops))
        total = code.multiply_add(
            code.load(at_totals, VECTOR), factors, _combined(code, sums, builder.fadd)
        )
        code.store(total, at_totals)

    return emitted(constants, 4, emit)


def _weighing(code: Vectors, places: list[Any], tops: list[Any]) -> Callable[..., list[Any]]:
    def weigh(v: Any, totals: list[Any]) -> list[Any]:
        following = []
        for place, top, total in zip(places, tops, totals, strict=True):
            at = code.plus(place, v, VECTOR_BYTES)
            weights = code.exponential(code.builder.fsub(code.load(at, VECTOR), top))
            code.store(weights, at)
            following.append(code.builder.fadd(total, weights))
        return following

    return weigh


def _combined(code: Vectors, rows: list[Any], combine: Callable[[Any, Any], Any]) -> Any:
    """A vector of what the elements of each row combine to."""
    columns = code.transposed([*rows, *[rows[0]] * (LANES - len(rows))])
    while len(columns) > 1:
        half = len(columns) // 2
        columns = [combine(a, b) for a, b in zip(columns[:half], columns[half:], strict=True)]
    return columns[0]


@tile
def bound_row(_: Any, scores: Any, vectors: Any, start: Any, stop: Any) -> Emit:
    """Put scores outside [start, stop) out of sight."""

    def emit(code: Vectors, scores: Any, vectors: Any, start: Any, stop: Any) -> None:
        builder = code.builder
        first, end = code.spread_integer(start), code.spread_integer(stop)

        def step(v: Any, states: list[Any]) -> list[Any]:
            number = builder.add(
                code.spread_integer(builder.mul(v, integer(LANES))), code.lane_numbers()
            )
            seen = builder.and_(
                builder.icmp_signed(">=", number, first), builder.icmp_signed("<", number, end)
            )
            place = code.plus(scores, v, VECTOR_BYTES)
            code.store(builder.select(seen, code.load(place, VECTOR), vector(_UNSEEN)), place)
            return states

        code.repeat(vectors, [], step)

    return emitted((), 4, emit)


@tile
def cap_scores(_: Any, scores: Any, vectors: Any, cap: Any) -> Emit:
    """scores = cap * tanh(scores / cap)."""

    def emit(code: Vectors, scores: Any, vectors: Any, cap: Any) -> None:
        builder, limit = code.builder, code.splat(cap)
        minus_two, one = vector(-2.0), vector(1.0)

        def step(v: Any, states: list[Any]) -> list[Any]:
            place = code.plus(scores, v, VECTOR_BYTES)
            x = builder.fdiv(code.load(place, VECTOR), limit)
            size = code.greatest(x, builder.fneg(x))
            small = code.exponential(builder.fmul(size, minus_two))
            tanh = builder.fdiv(builder.fsub(one, small), builder.fadd(one, small))
            signed = builder.select(
                builder.fcmp_ordered("<", x, vector(0.0)), builder.fneg(tanh), tanh
            )
            code.store(builder.fmul(signed, limit), place)
            return states

        code.repeat(vectors, [], step)

    return emitted((), 2, emit, floats=1)


@tile
def shrinkage(_: Any, before: Any, after: Any) -> Emit:
    """e^(before - after): what weights relative to one maximum are worth relative to another."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        code = Vectors(builder)
        power = code.exponential(code.splat(builder.fsub(*arguments)))
        return builder.extract_element(power, ir.Constant(ir.IntType(32), 0))

    return types.float32(types.float32, types.float32), generate


@tile
def spread_head(_: Any, head: Any, width: Any, out: Any, scale: Any) -> Emit:
    """out, of whole vectors, = head * scale; zeros where its last vector overlaps."""

    def emit(code: Vectors, head: Any, width: Any, out: Any, scale: Any) -> None:
        factor = code.splat(scale)

        def step(at: Any, place: Any, is_new: Any) -> None:
            scaled = code.builder.fmul(code.load(code.plus(head, at, FLOAT_BYTES), VECTOR), factor)
            code.store(
                code.builder.select(is_new, scaled, vector(0.0)),
                code.plus(out, place, FLOAT_BYTES),
            )

        _each_vector(code, width, step)

    return emitted((), 3, emit, floats=1)


@tile
def gather_head(_: Any, sums: Any, width: Any, out: Any, adds: Any, factor: Any) -> Emit:
    """out = the sums of a head, of whole vectors, * factor; plus out if `adds` is not 0."""

    def emit(code: Vectors, sums: Any, width: Any, out: Any, adds: Any, factor: Any) -> None:
        builder, scale = code.builder, code.splat(factor)
        is_more = builder.icmp_signed("!=", adds, integer(0))

        def step(at: Any, place: Any, is_new: Any) -> None:
            to = code.plus(out, at, FLOAT_BYTES)
            found = code.load(to, VECTOR)
            before = builder.select(is_more, found, vector(0.0))
            more = code.multiply_add(
                code.load(code.plus(sums, place, FLOAT_BYTES), VECTOR), scale, before
            )
            code.store(builder.select(is_new, more, found), to)

        _each_vector(code, width, step)

    return emitted((), 4, emit, floats=1)


def _each_vector(code: Vectors, width: Any, body: Callable[[Any, Any, Any], None]) -> None:
    """body(number of its first element in a head, and in whole vectors; which elements no vector
    before it had)."""
    builder = code.builder
    whole = builder.sdiv(width, integer(LANES))
    left = builder.sub(width, builder.mul(whole, integer(LANES)))
    everything = ir.Constant(ir.VectorType(ir.IntType(1), LANES), [1] * LANES)

    def step(v: Any, states: list[Any]) -> list[Any]:
        at = builder.mul(v, integer(LANES))
        body(at, at, everything)
        return states

    def last(_: Any, states: list[Any]) -> list[Any]:
        first = code.spread_integer(builder.sub(integer(LANES), left))
        is_new = builder.icmp_signed(">=", code.lane_numbers(), first)
        body(code.plus(width, integer(-LANES)), builder.mul(whole, integer(LANES)), is_new)
        return states

    code.repeat(whole, [], step)
    code.repeat(builder.sub(vector_count(code, width), whole), [], last)
