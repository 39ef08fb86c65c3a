"""The inner loops of a product of many inputs: packing rows of a weight, and outer products.

A panel is 16 rows of a weight, element by element: [width, 16]. A tile multiplies it by some inputs
at once, with no sum across a register, and reads the panel in one stream. Written as LLVM
instructions, as `dot_tile` is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numba import types

from engine.instructions import FLOAT, LANES, VECTOR, Instructions, integer, vector
from engine.native_memory import intrinsic

if TYPE_CHECKING:
    from collections.abc import Callable

PANEL_ROWS = 2 * LANES


def panel_tile(inputs: int) -> Callable[..., None]:
    """A function `tile(panel, x, width, count, out, out_step, adds)` for kernels.

    `out[j * out_step + n] = panel[:, n] . x[j]` for j < inputs and n < 16, of `count` elements;
    that is added to what is there if `adds` is not 0. All addresses of float32; inputs are `width`
    apart.
    """

    @intrinsic
    def tile(
        _: Any, panel: Any, x: Any, width: Any, count: Any, out: Any, out_step: Any, adds: Any
    ) -> tuple[Any, Callable[..., Any]]:
        def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            panel, x, width, count, out, out_step, adds = arguments
            emitter = _Emitter(builder, inputs)
            sums = emitter.products(panel, emitter.rows_at(x, width), count)
            emitter.put(sums, emitter.rows_at(out, out_step), adds)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), emit

    return tile


@intrinsic
def pack_square(_: Any, rows: Any, width: Any, panel: Any) -> tuple[Any, Callable[..., Any]]:
    """For kernels: 8 elements of 8 rows, `width` apart, to 8 lines of a panel, 16 apart."""

    def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        rows, width, panel = arguments
        emitter = _Emitter(builder, LANES)
        zero = integer(0)
        loaded = [emitter.elements(row, zero, VECTOR) for row in emitter.rows_at(rows, width)]
        lines = emitter.rows_at(panel, integer(PANEL_ROWS))
        for line, column in zip(lines, emitter.transposed(loaded), strict=True):
            builder.store(column, builder.bitcast(line, VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), emit


class _Emitter(Instructions):
    """Emits one tile, of so many inputs. Sums are two vectors for each."""

    def __init__(self, builder: Any, inputs: int) -> None:
        super().__init__(builder)
        self._inputs = inputs

    def rows_at(self, address: Any, step: Any) -> list[Any]:
        """Pointers to one row for each input."""
        first = self.builder.inttoptr(address, FLOAT.as_pointer())
        numbers = range(self._inputs)
        return [self.at(first, self.builder.mul(step, integer(number))) for number in numbers]

    def products(self, panel: Any, inputs: list[Any], count: Any) -> list[list[Any]]:
        """The sums of the outer products."""
        lines = self.builder.inttoptr(panel, FLOAT.as_pointer())
        zeros = [vector(0.0) for _ in range(2 * self._inputs)]

        def step(at: Any, sums: list[Any]) -> list[Any]:
            line = self.builder.mul(at, integer(PANEL_ROWS))
            halves = [
                self.elements(lines, self.builder.add(line, integer(start)), VECTOR)
                for start in (0, LANES)
            ]
            numbers = [self.splat(self.elements(row, at, FLOAT)) for row in inputs]
            return [
                self.multiply_add(number, half, sums[2 * index + side])
                for index, number in enumerate(numbers)
                for side, half in enumerate(halves)
            ]

        sums = self.loop(integer(0), count, 1, zeros, step)
        return [sums[start : start + 2] for start in range(0, len(sums), 2)]

    def put(self, sums: list[list[Any]], rows: list[Any], adds: Any) -> None:
        """Store the sums, or add them to what is there."""
        builder = self.builder
        is_more = builder.icmp_signed("!=", adds, integer(0))
        zeros = vector(0.0)
        for row, halves in zip(rows, sums, strict=True):
            for side, total in enumerate(halves):
                place = self.at(row, integer(side * LANES))
                place = builder.bitcast(place, VECTOR.as_pointer())
                before = builder.select(is_more, builder.load(place, align=4), zeros)
                builder.store(builder.fadd(before, total), place, align=4)
