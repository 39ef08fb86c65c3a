"""Vector instructions of attention's tiles.

Addresses and offsets are 64-bit integers. Units (one head of one
token) are decoded as they are loaded, so that no tile cares how KV is stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llvmlite import ir

from engine.instructions import FLOAT, LANES, VECTOR, Instructions, integer, vector
from kvferry.config import KvDType

if TYPE_CHECKING:
    from collections.abc import Callable

_INT32 = ir.IntType(32)
_INT32S = ir.VectorType(_INT32, LANES)
_INT16S = ir.VectorType(ir.IntType(16), LANES)
_INT8S = ir.VectorType(ir.IntType(8), LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)
LINE = 64
"""Bytes of a cache line."""

_FLOAT32, _FLOAT16, _BFLOAT16, _INT8, _E4M3, _E5M2 = range(6)
FORMS = {
    KvDType.FLOAT32: _FLOAT32,
    KvDType.FLOAT16: _FLOAT16,
    KvDType.BFLOAT16: _BFLOAT16,
    KvDType.INT8: _INT8,
    KvDType.FLOAT8_E4M3: _E4M3,
    KvDType.FLOAT8_E5M2: _E5M2,
}
"""The number of an element type in a kernel."""
_ELEMENT_BYTES = {_FLOAT32: 4, _FLOAT16: 2, _BFLOAT16: 2, _INT8: 1, _E4M3: 1, _E5M2: 1}
_SCALE_BYTES = 4
"""int8: a float32 before the elements that it scales."""

_LOG2E = 1.4426950408889634
_LN2 = 0.6931471805599453
_LOWEST_EXPONENT = -87.0
"""e^-87 is about the smallest normal float32."""
_POLYNOMIAL = (0.0083125267, 0.041890169, 0.16667115, 0.49999231, 1.0, 1.0)
"""Of e^r for |r| <= ln 2 / 2, the least maximum of the relative error, 1.1e-7; exact at 0."""


class Vectors(Instructions):
    """Instructions on addresses instead of pointers."""

    def repeat(
        self, stop: Any, states: list[Any], body: Callable[[Any, list[Any]], list[Any]]
    ) -> list[Any]:
        """As `loop` from 0 on by 1, not unrolled."""
        return self.loop(integer(0), stop, 1, states, body, may_unroll=False)

    def plus(self, address: Any, offset: Any, factor: int = 1) -> Any:
        """address + offset * factor."""
        scaled = offset if factor == 1 else self.builder.mul(offset, integer(factor))
        return self.builder.add(address, scaled)

    def load(self, address: Any, kind: Any, align: int = 4) -> Any:
        """What lies at an address."""
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=align)

    def store(self, value: Any, address: Any) -> None:
        """Put float32 at an address."""
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer()), align=4)

    def least(self, a: Any, b: Any) -> Any:
        """The smaller integer."""
        return self.builder.select(self.builder.icmp_signed("<", a, b), a, b)

    def greatest(self, a: Any, b: Any) -> Any:
        """The greater of two floats or vectors."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def spread(self, vector: Any, lane: int) -> Any:
        """A vector of one element of another."""
        return self.shuffled(vector, vector, [lane] * LANES)

    def spread_integer(self, number: Any) -> Any:
        """A vector of an integer's lower 32 bits."""
        low = self.builder.trunc(number, _INT32)
        first = self.builder.insert_element(
            ir.Constant(_INT32S, ir.Undefined), low, ir.Constant(_INT32, 0)
        )
        return self.shuffled(first, first, [0] * LANES)

    def lane_numbers(self) -> Any:
        """0, 1, 2, ... as 32-bit integers."""
        return ir.Constant(_INT32S, list(range(LANES)))

    def four_sums(self, vectors: list[Any]) -> Any:
        """The sums of the elements of each of four vectors, as one vector of four."""
        first, second = self._pairs(*vectors[:2]), self._pairs(*vectors[2:])
        both = self._pairs(first, second)
        low, high = (self.shuffled(both, both, range(n, n + 4)) for n in (0, 4))
        return self.builder.fadd(low, high)

    def exponential(self, x: Any) -> Any:
        """e^x of a vector of x <= 0; exactly 0 below -87. Relative error below 5e-7."""
        builder = self.builder
        # NaN is not below, and stays.
        below = builder.fcmp_ordered("<", x, vector(_LOWEST_EXPONENT))
        n = self.call("nearbyint", builder.fmul(x, vector(_LOG2E)))
        r = self.multiply_add(n, vector(-_LN2), x)
        power = vector(_POLYNOMIAL[0])
        for coefficient in _POLYNOMIAL[1:]:
            power = self.multiply_add(power, r, vector(coefficient))
        exponent = builder.add(builder.fptosi(n, _INT32S), _integers(127))
        scale = builder.bitcast(builder.shl(exponent, _integers(23)), VECTOR)
        return builder.select(below, vector(0.0), builder.fmul(power, scale))

    def _pairs(self, a: Any, b: Any) -> Any:
        """Sums of neighbours within halves of a register: a, a, b, b, and the same above."""
        evens = self.shuffled(a, b, (0, 2, 8, 10, 4, 6, 12, 14))
        odds = self.shuffled(a, b, (1, 3, 9, 11, 5, 7, 13, 15))
        return self.builder.fadd(evens, odds)


class Units:
    """Loads of elements from units of one form."""

    def __init__(self, vectors: Vectors, form: int) -> None:
        self._vectors = vectors
        self._form = form
        self.element_bytes = _ELEMENT_BYTES[form]

    def open(self, address: Any) -> tuple[Any, Any]:
        """Where the elements of the unit at an address begin, and its scale as a vector."""
        if self._form != _INT8:
            return address, None
        scale = self._vectors.splat(self._vectors.load(address, FLOAT, align=1))
        return self._vectors.plus(address, integer(_SCALE_BYTES)), scale

    def load(self, unit: tuple[Any, Any], at: Any) -> Any:
        """Elements [at, at + LANES) of an opened unit, as float32."""
        elements, scale = unit
        builder = self._vectors.builder
        address = self._vectors.plus(elements, at, self.element_bytes)
        match self._form:
            case 0:
                return self._vectors.load(address, VECTOR)
            case 1:
                return builder.fpext(self._vectors.load(address, _HALVES, align=2), VECTOR)
            case 2:
                bits = builder.zext(self._vectors.load(address, _INT16S, align=2), _INT32S)
                return builder.bitcast(builder.shl(bits, _integers(16)), VECTOR)
            case 3:
                whole = builder.sext(self._vectors.load(address, _INT8S, align=1), _INT32S)
                return builder.fmul(builder.sitofp(whole, VECTOR), scale)
            case 4:
                return self._e4m3(self._vectors.load(address, _INT8S, align=1))
            case _:
                bits = builder.zext(self._vectors.load(address, _INT8S, align=1), _INT16S)
                moved = builder.shl(bits, ir.Constant(_INT16S, [8] * LANES))
                return builder.fpext(builder.bitcast(moved, _HALVES), VECTOR)

    def _e4m3(self, stored: Any) -> Any:
        """float8 e4m3fn, by way of a float16 that is 2^8 too small; all bits set is NaN."""
        builder = self._vectors.builder

        def bits(value: int) -> Any:
            return ir.Constant(_INT16S, [value] * LANES)

        wide = builder.zext(stored, _INT16S)
        magnitude = builder.and_(wide, bits(0x7F))
        sign = builder.shl(builder.and_(wide, bits(0x80)), bits(8))
        half = builder.or_(sign, builder.shl(magnitude, bits(7)))
        number = builder.fpext(builder.bitcast(half, _HALVES), VECTOR)
        no_number = builder.icmp_unsigned("==", magnitude, bits(0x7F))
        nan = vector(float("nan"))
        return builder.select(no_number, nan, builder.fmul(number, vector(256.0)))


def _integers(value: int) -> Any:
    return ir.Constant(_INT32S, [value] * LANES)
