"""Vector instructions, as LLVM knows them: what a loop in Python cannot say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba.core import cgutils

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LANES = 8
"""float32 in a register of AVX2. For other processors LLVM uses two registers, or half of one."""
FLOAT = ir.FloatType()
VECTOR = ir.VectorType(FLOAT, LANES)
_INT = ir.IntType(64)
_INT32 = ir.IntType(32)
_BYTES = ir.IntType(8).as_pointer()


class Instructions:
    """Emits what kernels are made of where `builder` stands."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def loop(
        self,
        start: Any,
        stop: Any,
        step: int,
        states: list[Any],
        body: Callable[[Any, list[Any]], list[Any]],
    ) -> list[Any]:
        """for at in range(start, stop, step): states = body(at, states). The last states."""
        builder = self.builder
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
        following = [builder.add(at, integer(step)), *body(at, current)]
        for variable, value in zip(variables, following, strict=True):
            variable.add_incoming(value, builder.block)
        builder.branch(head)
        builder.position_at_end(after)
        return current

    def load(self, row: Any, at: Any, kind: Any) -> Any:
        """The elements of a row from number `at` on that make a `kind`."""
        place = self.builder.bitcast(self.at(row, at), kind.as_pointer())
        return self.builder.load(place, align=1)

    def ask(self, address: Any) -> None:
        """Ask for a cache line."""
        kind = ir.FunctionType(ir.VoidType(), [_BYTES, _INT32, _INT32, _INT32])
        prefetch = self.function("llvm.prefetch.p0i8", kind)
        # To read, into the nearest cache, data.
        how = [ir.Constant(_INT32, number) for number in (0, 3, 1)]
        self.builder.call(prefetch, [self.builder.inttoptr(address, _BYTES), *how])

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c, of float32 or vectors, rounded once."""
        name = "llvm.fma.f32" if a.type == FLOAT else f"llvm.fma.v{LANES}f32"
        return self.builder.call(
            self.function(name, ir.FunctionType(a.type, [a.type] * 3)), [a, b, c]
        )

    def splat(self, number: Any) -> Any:
        """A vector of one float32."""
        first = self.builder.insert_element(
            ir.Constant(VECTOR, ir.Undefined), number, ir.Constant(_INT32, 0)
        )
        chosen = ir.Constant(ir.VectorType(_INT32, LANES), [0] * LANES)
        return self.builder.shuffle_vector(first, first, chosen)

    def function(self, name: str, kind: Any) -> Any:
        """One of LLVM's own."""
        module = self.builder.module
        return cgutils.get_or_insert_function(module, kind, name)  # type: ignore[no-untyped-call]

    def across(self, vector: Any) -> Any:
        """The sum of a vector's elements."""
        lanes = LANES
        while lanes > 1:
            lanes //= 2
            low, high = (
                self.shuffled(vector, vector, range(first, first + lanes)) for first in (0, lanes)
            )
            vector = self.builder.fadd(low, high)
        return self.builder.extract_element(vector, ir.Constant(_INT32, 0))

    def shuffled(self, first: Any, second: Any, lanes: Sequence[int]) -> Any:
        """Elements of two vectors by their numbers."""
        chosen = ir.Constant(ir.VectorType(_INT32, len(lanes)), list(lanes))
        return self.builder.shuffle_vector(first, second, chosen)

    def at(self, first: Any, index: Any) -> Any:
        """A pointer to a later element."""
        return self.builder.gep(first, [index])


def integer(value: int) -> Any:
    """A 64-bit integer."""
    return ir.Constant(_INT, value)
