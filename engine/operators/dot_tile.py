"""The inner loop of a product: dot products of some weight rows with some inputs at once.

Written as LLVM instructions, since no loop in Python makes LLVM do all of this: keep one register
of sums for each pair of a row and an input, load each row and each input once per step, and ask for
what comes next from memory meanwhile. A pair is always summed in the same order, whatever else is
in its tile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from engine.native_memory import intrinsic

if TYPE_CHECKING:
    from collections.abc import Callable

LANES = 8
"""float32 in a register of AVX2. For other processors LLVM uses two registers, or half of one."""
_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_INT = ir.IntType(64)
_INT32 = ir.IntType(32)
_BYTES = ir.IntType(8).as_pointer()


def dot_tile(rows: int, inputs: int) -> Callable[..., None]:
    """A function `tile(weight, x, width, out, out_step, ahead, ahead_step)` for kernels.

    `out[j * out_step + i] = weight[i] . x[j]` for i < rows and j < inputs. weight and x: addresses
    of neighbouring rows of `width` float32; out: one of float32. Each step of 8 elements asks for
    the cache line at `ahead`, which moves by `ahead_step` bytes.
    """

    @intrinsic
    def tile(
        _: Any, weight: Any, x: Any, width: Any, out: Any, out_step: Any, ahead: Any, step: Any
    ) -> tuple[Any, Callable[..., Any]]:
        def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            weight, x, width, out, out_step, *ahead = arguments
            emitter = _Emitter(builder, rows, inputs)
            sums = emitter.dots(
                emitter.rows_at(weight, width, rows),
                emitter.rows_at(x, width, inputs),
                width,
                ahead,
            )
            emitter.put(sums, out, out_step)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), emit

    return tile


class _Emitter:
    """Emits one tile where `builder` stands. Pairs are in the order of `_pairs`."""

    def __init__(self, builder: Any, rows: int, inputs: int) -> None:
        self._builder = builder
        self._pairs = [(i, j) for j in range(inputs) for i in range(rows)]

    def rows_at(self, address: Any, width: Any, count: int) -> list[Any]:
        """Pointers to `count` neighbouring rows."""
        first = self._builder.inttoptr(address, _FLOAT.as_pointer())
        return [self._at(first, self._builder.mul(width, _int(index))) for index in range(count)]

    def dots(self, rows: list[Any], inputs: list[Any], width: Any, ahead: list[Any]) -> list[Any]:
        """The sum of each pair: of vectors as far as they go, then of single elements."""
        whole = self._builder.and_(width, _int(-LANES))
        zeros = [ir.Constant(_VECTOR, [0.0] * LANES) for _ in self._pairs]
        position, ask_step = ahead

        def step(at: Any, states: list[Any]) -> list[Any]:
            asked, *sums = states
            self._ask(asked)
            products = self._multiply_add(rows, inputs, at, sums, _VECTOR)
            return [self._builder.add(asked, ask_step), *products]

        _, *sums = self._loop(_int(0), whole, LANES, [position, *zeros], step)
        return self._loop(
            whole,
            width,
            1,
            [self._across(vector) for vector in sums],
            lambda at, sums: self._multiply_add(rows, inputs, at, sums, _FLOAT),
        )

    def put(self, sums: list[Any], out: Any, out_step: Any) -> None:
        """Store the sums."""
        builder = self._builder
        first = builder.inttoptr(out, _FLOAT.as_pointer())
        for (i, j), total in zip(self._pairs, sums, strict=True):
            place = builder.add(builder.mul(out_step, _int(j)), _int(i))
            builder.store(total, self._at(first, place))

    def _loop(
        self,
        start: Any,
        stop: Any,
        step: int,
        states: list[Any],
        body: Callable[[Any, list[Any]], list[Any]],
    ) -> list[Any]:
        """for at in range(start, stop, step): states = body(at, states). The last states."""
        builder = self._builder
        before = builder.block
        head, inside, after = (builder.append_basic_block(name) for name in ("head", "body", "end"))
        builder.branch(head)
        builder.position_at_end(head)
        variables = [builder.phi(value.type) for value in (start, *states)]
        for variable, value in zip(variables, (start, *states), strict=True):
            variable.add_incoming(value, before)
        at, *current = variables
        builder.cbranch(builder.icmp_signed("<", at, stop), inside, after)
        builder.position_at_end(inside)
        following = [builder.add(at, _int(step)), *body(at, current)]
        for variable, value in zip(variables, following, strict=True):
            variable.add_incoming(value, builder.block)
        builder.branch(head)
        builder.position_at_end(after)
        return current

    def _multiply_add(
        self, rows: list[Any], inputs: list[Any], at: Any, sums: list[Any], kind: Any
    ) -> list[Any]:
        name = "llvm.fma.f32" if kind is _FLOAT else f"llvm.fma.v{LANES}f32"
        fma = self._intrinsic(name, ir.FunctionType(kind, [kind] * 3))
        of_rows = [self._load(row, at, kind) for row in rows]
        of_inputs = [self._load(row, at, kind) for row in inputs]
        return [
            self._builder.call(fma, [of_rows[i], of_inputs[j], total])
            for (i, j), total in zip(self._pairs, sums, strict=True)
        ]

    def _load(self, row: Any, at: Any, kind: Any) -> Any:
        place = self._builder.bitcast(self._at(row, at), kind.as_pointer())
        return self._builder.load(place, align=4)

    def _ask(self, address: Any) -> None:
        kind = ir.FunctionType(ir.VoidType(), [_BYTES, _INT32, _INT32, _INT32])
        prefetch = self._intrinsic("llvm.prefetch.p0i8", kind)
        # To read, into the nearest cache, data.
        how = [ir.Constant(_INT32, number) for number in (0, 3, 1)]
        self._builder.call(prefetch, [self._builder.inttoptr(address, _BYTES), *how])

    def _intrinsic(self, name: str, kind: Any) -> Any:
        module = self._builder.module
        return cgutils.get_or_insert_function(module, kind, name)  # type: ignore[no-untyped-call]

    def _across(self, vector: Any) -> Any:
        """The sum of a vector's elements."""
        lanes = LANES
        while lanes > 1:
            lanes //= 2
            low, high = (self._half(vector, first, lanes) for first in (0, lanes))
            vector = self._builder.fadd(low, high)
        return self._builder.extract_element(vector, ir.Constant(_INT32, 0))

    def _half(self, vector: Any, first: int, lanes: int) -> Any:
        chosen = ir.Constant(ir.VectorType(_INT32, lanes), list(range(first, first + lanes)))
        return self._builder.shuffle_vector(vector, vector, chosen)

    def _at(self, first: Any, index: Any) -> Any:
        return self._builder.gep(first, [index])


def _int(value: int) -> Any:
    return ir.Constant(_INT, value)
