"""The inner loops of attention, for kernels: each keeps all it sums in registers.

All arguments are integers: addresses, bytes between rows (`..._step`), and counts. Rows of a
kernel's own memory are of whole vectors. The first arguments, `form` and `rows`, are constants of
the calling kernel; each value makes other machine code.

A head that is no whole number of vectors has its last vector overlap the one before: element
`min(LANES * v, width - LANES)` is where vector v begins, see `engine.attention.heads`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from llvmlite import ir
from numba import extending, types

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
_FLOAT_BYTES = 4
_VECTOR_BYTES = LANES * _FLOAT_BYTES
_WORD_BYTES = 8
_Emit = tuple[Any, "Callable[..., Any]"]


def _tile(function: Callable[..., _Emit]) -> Callable[..., Any]:
    """As `native_memory.intrinsic`; types of constants tell their values."""
    return cast("Callable[..., Any]", extending.intrinsic(prefer_literal=True)(function))


def _emitted(constants: tuple[Any, ...], count: int, emit: Callable[..., None]) -> _Emit:
    """What an intrinsic of `constants` and `count` integers more returns.

    The constants are part of its signature, which tells one machine code from another. A tile is a
    function of its own: in the midst of a kernel, LLVM would not find registers for it.
    """

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        name = "_".join([emit.__qualname__, *(str(c.literal_value) for c in constants)])
        function = builder.module.globals.get(name)
        if function is None:
            kind = ir.FunctionType(ir.VoidType(), [INT] * count)
            function = ir.Function(builder.module, kind, name)
            function.linkage = "internal"
            function.attributes.add("noinline")
            inside = ir.IRBuilder(function.append_basic_block())
            emit(Vectors(inside), *function.args)
            inside.ret_void()
        builder.call(function, arguments[len(constants) :])
        return context.get_dummy_value()

    return types.void(*constants, *[types.int64] * count), generate


@_tile
def score_tile(  # noqa: PLR0913
    _: Any, form: Any, rows: Any, query: Any, query_step: Any, units: Any, offset: Any,
    width: Any, scores: Any, scores_step: Any,
) -> _Emit:  # fmt: skip
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
                code.plus(code.load(code.plus(units, integer(_WORD_BYTES * j)), INT, 8), offset)
            )
            for j in range(KEYS)
        ]
        queries = [code.plus(query, query_step, r) for r in range(rows)]

        def add(at: Any, place: Any, sums: list[Any]) -> list[Any]:
            of_queries = [code.load(code.plus(q, place, _FLOAT_BYTES), VECTOR) for q in queries]
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
        left = code.builder.sub(_vector_count(code, width), whole)
        last = code.plus(width, integer(-LANES))
        sums = code.repeat(left, sums, lambda _, sums: add(last, whole_elements, sums))
        for r in range(rows):
            dots = code.four_sums(sums[r::rows])
            code.store(dots, code.plus(scores, scores_step, r))

    return _emitted(constants, 7, emit)


@_tile
def ask_for_keys(_: Any, units: Any, offset: Any, size: Any) -> _Emit:
    """Ask memory for `size` bytes of each unit at units[AHEAD + j] + offset, for j < KEYS."""

    def emit(code: Vectors, units: Any, offset: Any, size: Any) -> None:
        words = [code.plus(units, integer(_WORD_BYTES * (AHEAD + j))) for j in range(KEYS)]
        asked = [code.plus(code.load(word, INT, 8), offset) for word in words]

        def step(line: Any, states: list[Any]) -> list[Any]:
            for unit in asked:
                # Not into the nearest: tokens may lie as far apart as its lines of one set do.
                code.ask(code.plus(unit, line, LINE), SECOND_CACHE)
            return states

        lines = code.builder.sdiv(code.plus(size, integer(LINE - 1)), integer(LINE))
        code.repeat(lines, [], step)

    return _emitted((), 3, emit)


@_tile
def value_tile(  # noqa: PLR0913
    _: Any, form: Any, rows: Any, columns: Any, units: Any, count: Any, offset: Any, width: Any,
    first: Any, weights: Any, weights_step: Any, sums: Any, sums_step: Any,
) -> _Emit:  # fmt: skip
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
        block = code.plus(sums, first, _VECTOR_BYTES)
        places = [
            code.plus(code.plus(block, sums_step, r), integer(_VECTOR_BYTES * v))
            for v in range(columns)
            for r in range(rows)
        ]
        of_rows = [code.plus(weights, weights_step, r) for r in range(rows)]

        def step(j: Any, totals: list[Any]) -> list[Any]:
            word = code.plus(units, j, _WORD_BYTES)
            unit = stored.open(code.plus(code.load(word, INT, 8), offset))
            weight = [
                code.splat(code.load(code.plus(row, j, _FLOAT_BYTES), FLOAT)) for row in of_rows
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

    return _emitted(constants, 9, emit)


@_tile
def product_tile(  # noqa: PLR0913
    _: Any, scaled: Any, a: Any, a_step: Any, b: Any, b_step: Any, count: Any, out: Any,
    out_step: Any, factors: Any,
) -> _Emit:  # fmt: skip
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
            code.plus(code.plus(out, out_step, r), integer(_VECTOR_BYTES * v))
            for r in range(BLOCK_ROWS)
            for v in range(2)
        ]
        starts = [vector(0.0)] * len(places)
        if scaled:
            factor = [
                code.splat(code.load(code.plus(factors, integer(_FLOAT_BYTES * r)), FLOAT))
                for r in range(BLOCK_ROWS)
            ]
            starts = [
                code.builder.fmul(code.load(place, VECTOR), factor[n // 2])
                for n, place in enumerate(places)
            ]

        def step(k: Any, totals: list[Any]) -> list[Any]:
            row = code.plus(b, code.builder.mul(k, b_step))
            panel = [
                code.load(code.plus(row, integer(_VECTOR_BYTES * v)), VECTOR) for v in range(2)
            ]
            following = []
            for r in range(BLOCK_ROWS):
                number = code.splat(code.load(code.plus(of_rows[r], k, _FLOAT_BYTES), FLOAT))
                following += [
                    code.multiply_add(number, panel[v], totals[2 * r + v]) for v in range(2)
                ]
            return following

        for total, place in zip(code.repeat(count, starts, step), places, strict=True):
            code.store(total, place)

    return _emitted(constants, 8, emit)


@_tile
def transpose_tile(
    _: Any, form: Any, units: Any, offset: Any, width: Any, out: Any, out_step: Any
) -> _Emit:
    """out[d, j] = element d of the unit at units[j] + offset, for j < LANES and every d."""
    constants = (form,)
    form = form.literal_value

    def emit(code: Vectors, units: Any, offset: Any, width: Any, out: Any, out_step: Any) -> None:
        stored = Units(code, form)
        opened = [
            stored.open(
                code.plus(code.load(code.plus(units, integer(_WORD_BYTES * j)), INT, 8), offset)
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

        code.repeat(_vector_count(code, width), [], step)

    return _emitted(constants, 5, emit)


@_tile
def copy_unit(_: Any, form: Any, unit: Any, width: Any, out: Any) -> _Emit:
    """out = the elements of a unit as float32."""
    constants = (form,)
    form = form.literal_value

    def emit(code: Vectors, unit: Any, width: Any, out: Any) -> None:
        stored = Units(code, form)
        opened = stored.open(unit)
        last = code.plus(width, integer(-LANES))

        def step(v: Any, states: list[Any]) -> list[Any]:
            at = code.least(code.builder.mul(v, integer(LANES)), last)
            code.store(stored.load(opened, at), code.plus(out, v, _VECTOR_BYTES))
            return states

        code.repeat(_vector_count(code, width), [], step)

    return _emitted(constants, 3, emit)


@_tile
def highest_of(_: Any, scores: Any, vectors: Any, floor: Any) -> _Emit:
    """The greatest of `vectors` vectors of scores and of the float32 `floor`."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        scores, vectors, floor = arguments
        code = Vectors(builder)

        def step(v: Any, states: list[Any]) -> list[Any]:
            return [code.greatest(code.load(code.plus(scores, v, _VECTOR_BYTES), VECTOR), *states)]

        (highest,) = code.repeat(vectors, [code.splat(floor)], step)
        return code.across(highest, code.greatest)

    return types.float32(types.int64, types.int64, types.float32), generate


@_tile
def weigh(_: Any, scores: Any, vectors: Any, highest: Any) -> _Emit:
    """scores = e^(scores - highest), 0 where that is below e^-87. Their sum."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        scores, vectors, highest = arguments
        code = Vectors(builder)
        top = code.splat(highest)

        def step(v: Any, states: list[Any]) -> list[Any]:
            place = code.plus(scores, v, _VECTOR_BYTES)
            weights = code.exponential(builder.fsub(code.load(place, VECTOR), top))
            code.store(weights, place)
            return [builder.fadd(states[0], weights)]

        (total,) = code.repeat(vectors, [vector(0.0)], step)
        return code.across(total, builder.fadd)

    return types.float32(types.int64, types.int64, types.float32), generate


@_tile
def cap_scores(_: Any, scores: Any, vectors: Any, cap: Any) -> _Emit:
    """scores = cap * tanh(scores / cap)."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        scores, vectors, cap = arguments
        context = _context
        code = Vectors(builder)
        limit = code.splat(cap)
        minus_two, one = vector(-2.0), vector(1.0)

        def step(v: Any, states: list[Any]) -> list[Any]:
            place = code.plus(scores, v, _VECTOR_BYTES)
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
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), generate


@_tile
def shrinkage(_: Any, before: Any, after: Any) -> _Emit:
    """e^(before - after): what weights relative to one maximum are worth relative to another."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        code = Vectors(builder)
        power = code.exponential(code.splat(builder.fsub(*arguments)))
        return builder.extract_element(power, ir.Constant(ir.IntType(32), 0))

    return types.float32(types.float32, types.float32), generate


def _vector_count(code: Vectors, width: Any) -> Any:
    return code.builder.sdiv(code.plus(width, integer(LANES - 1)), integer(LANES))
