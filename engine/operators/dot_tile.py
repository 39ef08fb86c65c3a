"""The inner loop of a product: dot products of some weight rows with some inputs at once.

Written as LLVM instructions, since no loop in Python makes LLVM do all of this: keep one register
of sums for each pair of a row and an input, load each row and each input once per step, and ask for
what comes next from memory meanwhile. A pair is always summed in the same order, whatever else is
in its tile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numba import types

from engine.instructions import FLOAT, LANES, VECTOR, Instructions, integer, vector
from engine.native_memory import intrinsic

if TYPE_CHECKING:
    from collections.abc import Callable


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


class _Emitter(Instructions):
    """Emits one tile. Pairs are in the order of `_pairs`."""

    def __init__(self, builder: Any, rows: int, inputs: int) -> None:
        super().__init__(builder)
        self._pairs = [(i, j) for j in range(inputs) for i in range(rows)]

    def rows_at(self, address: Any, width: Any, count: int) -> list[Any]:
        """Pointers to `count` neighbouring rows."""
        first = self.builder.inttoptr(address, FLOAT.as_pointer())
        return [self.at(first, self.builder.mul(width, integer(index))) for index in range(count)]

    def dots(self, rows: list[Any], inputs: list[Any], width: Any, ahead: list[Any]) -> list[Any]:
        """The sum of each pair: of vectors as far as they go, then of single elements."""
        whole = self.builder.and_(width, integer(-LANES))
        zeros = [vector(0.0) for _ in self._pairs]
        position, ask_step = ahead

        def step(at: Any, states: list[Any]) -> list[Any]:
            asked, *sums = states
            self.ask(asked)
            products = self._multiply_add(rows, inputs, at, sums, VECTOR)
            return [self.builder.add(asked, ask_step), *products]

        _, *sums = self.loop(integer(0), whole, LANES, [position, *zeros], step)
        return self.loop(
            whole,
            width,
            1,
            [self.across(each, self.builder.fadd) for each in sums],
            lambda at, sums: self._multiply_add(rows, inputs, at, sums, FLOAT),
        )

    def put(self, sums: list[Any], out: Any, out_step: Any) -> None:
        """Store the sums."""
        builder = self.builder
        first = builder.inttoptr(out, FLOAT.as_pointer())
        for (i, j), total in zip(self._pairs, sums, strict=True):
            place = builder.add(builder.mul(out_step, integer(j)), integer(i))
            builder.store(total, self.at(first, place))

    def _multiply_add(
        self, rows: list[Any], inputs: list[Any], at: Any, sums: list[Any], kind: Any
    ) -> list[Any]:
        of_rows = [self.elements(row, at, kind) for row in rows]
        of_inputs = [self.elements(row, at, kind) for row in inputs]
        return [
            self.multiply_add(of_rows[i], of_inputs[j], total)
            for (i, j), total in zip(self._pairs, sums, strict=True)
        ]
