"""Vector instructions of sampling: passes over a row of scores in groups of neighbours.

Scores and what is found of them lie at addresses. Groups are summed in one order whatever the
processor, and loops are written here: as loops of Numba they would take seconds to compile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import types

from engine.attention.vectors import Vectors
from engine.instructions import FLOAT, INT, LANES, VECTOR, integer, vector
from engine.native_memory import intrinsic

if TYPE_CHECKING:
    from collections.abc import Callable

    _Emit = tuple[Any, Callable[..., Any]]

GROUP = 64
"""Scores of a group. Rows are whole groups: behind the last token there is -inf."""
_GROUP_BYTES = 4 * GROUP
_BYTE = ir.IntType(8)
_DOUBLE = ir.DoubleType()
_LANE_BITS = ir.VectorType(ir.IntType(1), LANES)
_LOWEST = float("-inf")
_NO_WEIGHT = vector(-88.0)
"""Weights of what is less are 0; e^-87 is about the smallest normal float32."""
_PLACES = range(0, _GROUP_BYTES, 4 * LANES)


@intrinsic
def find_maxima(_: Any, scores: Any, groups: Any, maxima: Any) -> _Emit:
    """For kernels: maxima [groups] of a row's groups, float32; that of the row. What is no number
    counts as -inf."""

    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        vectors = Vectors(builder)
        scores, groups, maxima = arguments

        def step(group: Any, states: list[Any]) -> list[Any]:
            highest = vector(_LOWEST)
            for each in _load_group(vectors, vectors.plus(scores, group, _GROUP_BYTES)):
                highest = vectors.call("maxnum", each, highest)
            found = vectors.across(highest, vectors.greatest)
            vectors.store(found, vectors.plus(maxima, group, 4))
            return [vectors.greatest(found, states[0])]

        return vectors.repeat(groups, [ir.Constant(FLOAT, _LOWEST)], step)[0]

    return types.float32(*[types.int64] * 3), emit


@intrinsic
def find_allowed_maxima(_: Any, scores: Any, groups: Any, bits: Any, maxima: Any) -> _Emit:
    """As `find_maxima`; what `keep_allowed` would make -inf counts as that."""

    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        vectors = Vectors(builder)
        scores, groups, bits, maxima = arguments

        def step(group: Any, states: list[Any]) -> list[Any]:
            highest = vector(_LOWEST)
            word = vectors.load(vectors.plus(bits, group, 8), INT)
            for each in _allowed(vectors, vectors.plus(scores, group, _GROUP_BYTES), word):
                highest = vectors.call("maxnum", each, highest)
            found = vectors.across(highest, vectors.greatest)
            vectors.store(found, vectors.plus(maxima, group, 4))
            return [vectors.greatest(found, states[0])]

        return vectors.repeat(groups, [ir.Constant(FLOAT, _LOWEST)], step)[0]

    return types.float32(*[types.int64] * 4), emit


@intrinsic
def add_weights(
    _: Any, scores: Any, groups: Any, best: Any, factor: Any, least: Any, reached: Any
) -> _Emit:
    """For kernels: reached [groups] = the weights of all groups up to the end of each, float64.
    See `weigh_group`. Groups are summed in float32: of more tokens the sum would be coarse."""

    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        vectors = Vectors(builder)
        scores, groups, *numbers, reached = arguments
        numbers = [vectors.splat(each) for each in numbers]

        def step(group: Any, states: list[Any]) -> list[Any]:
            weights = _weights(vectors, vectors.plus(scores, group, _GROUP_BYTES), numbers)
            total = builder.fadd(states[0], builder.fpext(_sum(vectors, weights), _DOUBLE))
            vectors.store(total, vectors.plus(reached, group, 8))
            return [total]

        return vectors.repeat(groups, [ir.Constant(_DOUBLE, 0.0)], step)[0]

    numbers = [types.float32] * 3
    return types.float64(types.int64, types.int64, *numbers, types.int64), emit


@intrinsic
def weigh_group(_: Any, group: Any, best: Any, factor: Any, least: Any, out: Any) -> _Emit:
    """For kernels: out [64] = exp((score - best) * factor) of the scores at an address, 0 where
    that is below `least` or no number."""

    def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        vectors = Vectors(builder)
        group, *numbers, out = arguments
        weights = _weights(vectors, group, [vectors.splat(each) for each in numbers])
        for place, each in zip(_PLACES, weights, strict=True):
            vectors.store(each, vectors.plus(out, integer(place)))
        return context.get_dummy_value()

    return types.void(types.int64, *[types.float32] * 3, types.int64), emit


@intrinsic
def count_reaching(_: Any, scores: Any, groups: Any, bound: Any) -> _Emit:
    """For kernels: how many scores of a row are at least `bound`."""

    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        vectors = Vectors(builder)
        scores, groups, bound = arguments
        least = vectors.splat(bound)

        def step(group: Any, states: list[Any]) -> list[Any]:
            bits = _reaching(vectors, vectors.plus(scores, group, _GROUP_BYTES), least)
            return [builder.add(states[0], builder.ctpop(bits))]

        return vectors.repeat(groups, [integer(0)], step)[0]

    return types.int64(types.int64, types.int64, types.float32), emit


@intrinsic
def reaching(_: Any, group: Any, bound: Any) -> _Emit:
    """For kernels: one bit for each score of a group, lowest first: whether it is at least
    `bound`."""

    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        vectors = Vectors(builder)
        return _reaching(vectors, arguments[0], vectors.splat(arguments[1]))

    return types.int64(types.int64, types.float32), emit


@intrinsic
def lowest_bit(_: Any, word: Any) -> _Emit:
    """For kernels: the number of the lowest bit that is set, of a word that is not 0."""

    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), emit


@intrinsic
def spread(_: Any, logits: Any, count: Any, scores: Any) -> _Emit:
    """For kernels: copy so many logits to a row of scores, and -inf behind them."""

    def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        vectors = Vectors(builder)
        logits, count, scores = arguments
        whole = builder.and_(count, integer(-LANES))
        padded = builder.and_(builder.add(count, integer(GROUP - 1)), integer(-GROUP))

        def copy(kind: Any) -> Callable[[Any, list[Any]], list[Any]]:
            def step(at: Any, _: list[Any]) -> list[Any]:
                each = vectors.load(vectors.plus(logits, at, 4), kind)
                vectors.store(each, vectors.plus(scores, at, 4))
                return []

            return step

        def fill(at: Any, _: list[Any]) -> list[Any]:
            vectors.store(ir.Constant(FLOAT, _LOWEST), vectors.plus(scores, at, 4))
            return []

        vectors.loop(integer(0), whole, LANES, [], copy(VECTOR))
        vectors.loop(whole, count, 1, [], copy(FLOAT))
        vectors.loop(count, padded, 1, [], fill)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), emit


@intrinsic
def keep_allowed(_: Any, scores: Any, groups: Any, bits: Any) -> _Emit:
    """For kernels: make -inf of each score of a row whose bit is not set, lowest first. `bits`: the
    address of a 64-bit word for each group."""

    def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        vectors = Vectors(builder)
        scores, groups, bits = arguments

        def step(number: Any, _: list[Any]) -> list[Any]:
            group = vectors.plus(scores, number, _GROUP_BYTES)
            word = vectors.load(vectors.plus(bits, number, 8), INT)
            for place, each in zip(_PLACES, _allowed(vectors, group, word), strict=True):
                vectors.store(each, vectors.plus(group, integer(place)))
            return []

        vectors.repeat(groups, [], step)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), emit


def _load_group(vectors: Vectors, group: Any) -> list[Any]:
    return [vectors.load(vectors.plus(group, integer(place)), VECTOR) for place in _PLACES]


def _allowed(vectors: Vectors, group: Any, word: Any) -> list[Any]:
    """The scores of a group; -inf where the bit of a word is not set, lowest first."""
    builder, kept = vectors.builder, []
    for lane, each in enumerate(_load_group(vectors, group)):
        byte = builder.trunc(builder.lshr(word, integer(lane * LANES)), _BYTE)
        allowed = builder.bitcast(byte, _LANE_BITS)
        kept.append(builder.select(allowed, each, vector(_LOWEST)))
    return kept


def _weights(vectors: Vectors, group: Any, numbers: list[Any]) -> list[Any]:
    """numbers: best, factor and least, as vectors."""
    best, factor, least = numbers
    builder, weights = vectors.builder, []
    for each in _load_group(vectors, group):
        scaled = builder.fmul(builder.fsub(each, best), factor)
        weight = vectors.exponential(vectors.call("maxnum", scaled, _NO_WEIGHT))
        enough = builder.fcmp_ordered(">=", weight, least)
        weights.append(builder.select(enough, weight, vector(0.0)))
    return weights


def _sum(vectors: Vectors, sums: list[Any]) -> Any:
    while len(sums) > 1:
        pairs = zip(sums[::2], sums[1::2], strict=True)
        sums = [vectors.builder.fadd(*pair) for pair in pairs]
    return vectors.across(sums[0], vectors.builder.fadd)


def _reaching(vectors: Vectors, group: Any, least: Any) -> Any:
    builder, bits = vectors.builder, integer(0)
    for lane, each in enumerate(_load_group(vectors, group)):
        byte = builder.bitcast(builder.fcmp_ordered(">=", each, least), _BYTE)
        moved = builder.shl(builder.zext(byte, INT), integer(lane * LANES))
        bits = builder.or_(bits, moved)
    return bits
