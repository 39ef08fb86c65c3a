"""Memory by its address, for kernels that several threads run: arrays, atomic words, calls.

What threads hand to each other is 64-bit words at addresses, since machine code that waits without
the interpreter's lock can take no Python object. Operations are sequentially consistent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numba
import numpy as np
from llvmlite import ir
from numba import extending, types

from engine.native_math import inlined

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

_WORD = ir.IntType(64)
_ORDER = "seq_cst"
_Emit = tuple[Any, "Callable[..., Any]"]


def intrinsic(function: Callable[..., _Emit]) -> Callable[..., Any]:
    """For kernels: what `function` says of the types of a call, and which instructions it emits."""
    return cast("Callable[..., Any]", extending.intrinsic(function))


def literal_intrinsic(function: Callable[..., _Emit]) -> Callable[..., Any]:
    """As `intrinsic`; the types of constants tell their values."""
    return cast("Callable[..., Any]", extending.intrinsic(prefer_literal=True)(function))


def library_function(name: str, signature: Any) -> Callable[..., Any]:
    """A function of the C library, for kernels."""
    return cast("Callable[..., Any]", types.ExternalFunction(name, signature))


@inlined
def address_of(array: NDArray[Any]) -> Any:
    """Of its first element, signed: mixed with others, an unsigned number makes floats of all.

    For the compiler this is a use like any other, and an array is freed after its last: what is
    read by its address later needs a `keep` behind that.
    """
    return np.int64(array.ctypes.data)


@inlined
def array_at(address: int, shape: Any, element: type) -> Any:
    """The contiguous array at an address; `element`: a type as `np.float32`."""
    return numba.carray(_pointer(address, element), shape)  # type: ignore[attr-defined]


@intrinsic
def _pointer(_: Any, address: Any, element: Any) -> _Emit:
    result = types.CPointer(element.instance_type)  # type: ignore[no-untyped-call]

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return result(types.int64, element), emit


def _peek(kind: Any, result: Any) -> Callable[[int], Any]:
    """A function that reads what lies at an address."""

    @intrinsic
    def peek(_: Any, address: Any) -> _Emit:
        def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return builder.load(builder.inttoptr(arguments[0], kind.as_pointer()), align=1)

        return result(types.int64), emit

    return peek


word_at = _peek(_WORD, types.int64)
int32_at = _peek(ir.IntType(32), types.int32)
float32_at = _peek(ir.FloatType(), types.float32)


def _poke(kind: Any, value: Any) -> Callable[[int, Any], None]:
    """A function that writes to an address."""

    @intrinsic
    def poke(_: Any, address: Any, _number: Any) -> _Emit:
        def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            place = builder.inttoptr(arguments[0], kind.as_pointer())
            builder.store(arguments[1], place, align=1)
            return context.get_dummy_value()

        return types.void(types.int64, value), emit

    return poke


put_word = _poke(_WORD, types.int64)
put_float32 = _poke(ir.FloatType(), types.float32)


@literal_intrinsic
def words_at(_: Any, address: Any, count: Any) -> _Emit:
    """So many words from an address on, a constant number, as a tuple."""
    kind = types.UniTuple(types.int64, count.literal_value)  # type: ignore[no-untyped-call]

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first = _word_at(builder, arguments[0])
        words = [
            builder.load(builder.gep(first, [ir.Constant(_WORD, index)]), align=8)
            for index in range(count.literal_value)
        ]
        return context.make_tuple(builder, signature.return_type, words)

    return kind(types.int64, count), emit


@intrinsic
def put_words(_: Any, address: Any, words: Any) -> _Emit:
    """Write a tuple of words from an address on."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first = _word_at(builder, arguments[0])
        for index in range(len(signature.args[1])):
            place = builder.gep(first, [ir.Constant(_WORD, index)])
            builder.store(builder.extract_value(arguments[1], index), place, align=8)
        return context.get_dummy_value()

    return types.void(types.int64, words), emit


@intrinsic
def keep(_: Any, array: Any) -> _Emit:
    """Have the memory of an array last until here, see `address_of`."""

    def emit(context: Any, _builder: Any, _signature: Any, _arguments: Any) -> Any:
        return context.get_dummy_value()

    return types.void(array), emit


@intrinsic
def load(_: Any, address: Any) -> _Emit:
    """The word at an address."""

    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_word_at(builder, arguments[0]), _ORDER, 8)

    return types.int64(types.int64), emit


@intrinsic
def store(_: Any, address: Any, value: Any) -> _Emit:
    """Put a word at an address."""

    def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], _word_at(builder, arguments[0]), _ORDER, 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def add(_: Any, address: Any, value: Any) -> _Emit:
    """Add to the word at an address; the word before."""

    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", _word_at(builder, arguments[0]), arguments[1], _ORDER)

    return types.int64(types.int64, types.int64), emit


@intrinsic
def exchange(_: Any, address: Any, value: Any) -> _Emit:
    """Put a word at an address; the word before."""

    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("xchg", _word_at(builder, arguments[0]), arguments[1], _ORDER)

    return types.int64(types.int64, types.int64), emit


@intrinsic
def call(_: Any, function: Any, arguments: Any, index: Any) -> _Emit:
    """Call the machine code at an address, an `engine.native_math.task`."""
    kind = ir.FunctionType(_WORD, [_WORD, _WORD]).as_pointer()

    def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.call(builder.inttoptr(values[0], kind), values[1:])

    return types.int64(types.int64, types.int64, types.int64), emit


def _word_at(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _WORD.as_pointer())
