"""The inner loops over a `QuantizedWeight`: its elements, or their product with an input.

Written as LLVM instructions: of a loop in Python LLVM makes no vectors here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import types

from engine.instructions import FLOAT, LANES, VECTOR, Instructions, integer, vector
from engine.native_memory import intrinsic
from engine.operators.quantized_weight import GROUP

if TYPE_CHECKING:
    from collections.abc import Callable

_BYTE = ir.IntType(8)
_BYTES = ir.VectorType(_BYTE, LANES)
_INTEGERS = ir.VectorType(ir.IntType(32), LANES)
_VECTORS = GROUP // LANES


@intrinsic
def group_elements(
    _: Any, values: Any, scales: Any, groups: Any, out: Any
) -> tuple[Any, Callable[..., Any]]:
    """For kernels: the elements of `groups` whole groups of a row, to out; all addresses."""

    def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        groups = _Groups(builder, *arguments[:3])
        place = builder.inttoptr(arguments[3], FLOAT.as_pointer())

        def step(group: Any, states: list[Any]) -> list[Any]:
            scale = groups.scale(group)
            for number in range(_VECTORS):
                element = groups.place(group, number)
                at = builder.bitcast(groups.at(place, element), VECTOR.as_pointer())
                builder.store(builder.fmul(groups.values(element), scale), at, align=4)
            return states

        groups.each([], step)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), emit


@intrinsic
def group_dot(
    _: Any, values: Any, scales: Any, groups: Any, x: Any
) -> tuple[Any, Callable[..., Any]]:
    """For kernels: the product of `groups` whole groups of a row with as many float32 at x.

    A group's products are summed before they are scaled, once.
    """

    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        groups = _Groups(builder, *arguments[:3])
        inputs = builder.inttoptr(arguments[3], FLOAT.as_pointer())

        def step(group: Any, states: list[Any]) -> list[Any]:
            of_group = None
            for number in range(_VECTORS):
                element = groups.place(group, number)
                values, x = groups.values(element), groups.elements(inputs, element, VECTOR)
                of_group = (
                    builder.fmul(values, x)
                    if of_group is None
                    else groups.multiply_add(values, x, of_group)
                )
            return [groups.multiply_add(of_group, groups.scale(group), states[0])]

        (total,) = groups.each([vector(0.0)], step)
        return groups.across(total, builder.fadd)

    return types.float32(*[types.int64] * 4), emit


class _Groups(Instructions):
    """The groups of a row."""

    def __init__(self, builder: Any, values: Any, scales: Any, count: Any) -> None:
        super().__init__(builder)
        self._values = builder.inttoptr(values, _BYTE.as_pointer())
        self._scales = builder.inttoptr(scales, FLOAT.as_pointer())
        self._count = count

    def each(self, states: list[Any], step: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
        """As `loop`, over the groups."""
        return self.loop(integer(0), self._count, 1, states, step)

    def place(self, group: Any, number: int) -> Any:
        """The number in its row of the first element of a group's vector."""
        builder = self.builder
        return builder.add(builder.mul(group, integer(GROUP)), integer(number * LANES))

    def values(self, element: Any) -> Any:
        """Those from an element on, as float32."""
        wide = self.builder.sext(self.elements(self._values, element, _BYTES), _INTEGERS)
        return self.builder.sitofp(wide, VECTOR)

    def scale(self, group: Any) -> Any:
        """A group's, in every lane."""
        return self.splat(self.elements(self._scales, group, FLOAT))
