"""How kernels call a tile: a function of LLVM's instructions, one for each value of its constants.

All arguments are 64-bit integers (addresses, bytes between rows: `..._step`, counts), then float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import types

from engine.attention.vectors import Vectors
from engine.instructions import FLOAT, INT, LANES, integer
from engine.native_memory import literal_intrinsic as tile

if TYPE_CHECKING:
    from collections.abc import Callable

FLOAT_BYTES = 4
VECTOR_BYTES = LANES * FLOAT_BYTES
WORD_BYTES = 8
__all__ = ["FLOAT_BYTES", "VECTOR_BYTES", "WORD_BYTES", "Emit", "emitted", "tile", "vector_count"]

Emit = tuple[Any, "Callable[..., Any]"]


def emitted(
    constants: tuple[Any, ...], count: int, emit: Callable[..., None], floats: int = 0
) -> Emit:
    """What an intrinsic of `constants`, `count` integers and `floats` float32 returns.

    The constants are part of its signature, which tells one machine code from another. A tile is a
    function of its own: in the midst of a kernel, LLVM would not find registers for it.
    """
    kinds = [INT] * count + [FLOAT] * floats

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        name = "_".join([emit.__qualname__, *(str(c.literal_value) for c in constants)])
        function = builder.module.globals.get(name)
        if function is None:
            kind = ir.FunctionType(ir.VoidType(), kinds)
            function = ir.Function(builder.module, kind, name)
            function.linkage = "internal"
            function.attributes.add("noinline")
            inside = ir.IRBuilder(function.append_basic_block())
            emit(Vectors(inside), *function.args)
            inside.ret_void()
        builder.call(function, arguments[len(constants) :])
        return context.get_dummy_value()

    numbers = [types.int64] * count + [types.float32] * floats
    return types.void(*constants, *numbers), generate


def vector_count(code: Vectors, width: Any) -> Any:
    """How many vectors a head is, the last one overlapping the one before if need be."""
    return code.builder.sdiv(code.plus(width, integer(LANES - 1)), integer(LANES))
