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
INT = ir.IntType(64)
VECTOR = ir.VectorType(FLOAT, LANES)
_INT32 = ir.IntType(32)
_BYTES = ir.IntType(8).as_pointer()
NEAREST_CACHE, SECOND_CACHE = 3, 2
"""Where `Instructions.ask` has a line brought."""


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
        *,
        may_unroll: bool = True,
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
        back = builder.branch(head)
        if not may_unroll:
            back.set_metadata("llvm.loop", self._not_unrolled())
        builder.position_at_end(after)
        return current

    def _not_unrolled(self) -> Any:
        """Says of a loop that it stays as it is: twice the loads would not fit in the registers.

        LLVM wants such a node to begin with itself.
        """
        module = self.builder.module
        how = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])
        node = module.add_metadata([how, integer(len(module.metadata))])
        node.operands = (node, how)
        return node

    def elements(self, row: Any, at: Any, kind: Any) -> Any:
        """The elements of a row from number `at` on that make a `kind`."""
        place = self.builder.bitcast(self.at(row, at), kind.as_pointer())
        return self.builder.load(place, align=1)

    def ask(self, address: Any, cache: int = NEAREST_CACHE) -> None:
        """Ask for a cache line, to read."""
        kind = ir.FunctionType(ir.VoidType(), [_BYTES, _INT32, _INT32, _INT32])
        prefetch = self.function("llvm.prefetch.p0i8", kind)
        how = [ir.Constant(_INT32, number) for number in (0, cache, 1)]
        self.builder.call(prefetch, [self.builder.inttoptr(address, _BYTES), *how])

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c, of float32 or vectors, rounded once."""
        return self.call("fma", a, b, c)

    def call(self, name: str, *arguments: Any) -> Any:
        """One of LLVM's functions of float32 or vectors."""
        kind = arguments[0].type
        suffix = "f32" if kind == FLOAT else f"v{LANES}f32"
        function = ir.FunctionType(kind, [kind] * len(arguments))
        return self.builder.call(self.function(f"llvm.{name}.{suffix}", function), arguments)

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

    def across(self, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """All elements of a vector combined."""
        lanes = LANES
        while lanes > 1:
            lanes //= 2
            low, high = (
                self.shuffled(vector, vector, range(first, first + lanes)) for first in (0, lanes)
            )
            vector = combine(low, high)
        return self.builder.extract_element(vector, ir.Constant(_INT32, 0))

    def shuffled(self, first: Any, second: Any, lanes: Sequence[int]) -> Any:
        """Elements of two vectors by their numbers."""
        chosen = ir.Constant(ir.VectorType(_INT32, len(lanes)), list(lanes))
        return self.builder.shuffle_vector(first, second, chosen)

    def transposed(self, rows: list[Any]) -> list[Any]:
        """Eight vectors as the columns of eight."""
        for distance in (1, 2, 4):
            own = [lane & ~distance for lane in range(LANES)]
            low = [n + (LANES if lane & distance else 0) for lane, n in enumerate(own)]
            high = [n + distance for n in low]
            mixed = list(rows)
            for n in sorted(set(own)):
                pair = rows[n], rows[n + distance]
                mixed[n] = self.shuffled(*pair, low)
                mixed[n + distance] = self.shuffled(*pair, high)
            rows = mixed
        return rows

    def at(self, first: Any, index: Any) -> Any:
        """A pointer to a later element."""
        return self.builder.gep(first, [index])


def integer(value: int) -> Any:
    """A 64-bit integer."""
    return ir.Constant(INT, value)


def vector(value: float) -> Any:
    """The same float32 in every lane."""
    return ir.Constant(VECTOR, [value] * LANES)
