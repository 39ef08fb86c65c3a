"""Vector instructions of attention's tiles, as LLVM knows them: what a loop in Python cannot say.

Addresses and offsets are 64-bit integers, vectors have `LANES` float32. Units (one head of one
token) are decoded as they are loaded, so that no tile cares how KV is stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba.core import cgutils

from kvferry.config import KvDType

if TYPE_CHECKING:
    from collections.abc import Callable

LANES = 8
"""float32 in a register of AVX2. For other processors LLVM uses two registers, or half of one."""
FLOAT = ir.FloatType()
INT = ir.IntType(64)
VECTOR = ir.VectorType(FLOAT, LANES)
_INT32 = ir.IntType(32)
_INT32S = ir.VectorType(_INT32, LANES)
_INT16S = ir.VectorType(ir.IntType(16), LANES)
_INT8S = ir.VectorType(ir.IntType(8), LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)
_BYTES = ir.IntType(8).as_pointer()
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
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
"""ln 2 in two: a whole number times the first is exact."""
_LOWEST_EXPONENT = -87.0
"""e^-87 is about the smallest normal float32."""
_POLYNOMIAL = (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0)
"""Taylor's of e^r: for |r| <= ln 2 / 2 the next summand is below 1.3e-7."""


class Vectors:
    """Emits instructions where `builder` stands."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def loop(
        self, stop: Any, states: list[Any], body: Callable[[Any, list[Any]], list[Any]]
    ) -> list[Any]:
        """for at in range(stop): states = body(at, states). The last states."""
        builder = self.builder
        before = builder.block
        head, inside, after = (builder.append_basic_block(name) for name in ("head", "body", "end"))
        builder.branch(head)
        builder.position_at_end(head)
        variables = [builder.phi(value.type) for value in (integer(0), *states)]
        for variable, value in zip(variables, (integer(0), *states), strict=True):
            variable.add_incoming(value, before)
        at, *current = variables
        builder.cbranch(builder.icmp_signed("<", at, stop), inside, after)
        builder.position_at_end(inside)
        following = [builder.add(at, integer(1)), *body(at, current)]
        for variable, value in zip(variables, following, strict=True):
            variable.add_incoming(value, builder.block)
        builder.branch(head).set_metadata("llvm.loop", self._not_unrolled())
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

    def splat(self, number: Any) -> Any:
        """A vector of one float32."""
        first = self.builder.insert_element(
            ir.Constant(VECTOR, ir.Undefined), number, ir.Constant(_INT32, 0)
        )
        zeros = ir.Constant(_INT32S, [0] * LANES)
        return self.builder.shuffle_vector(first, first, zeros)

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c, rounded once."""
        return self._call("fma", a.type, a, b, c)

    def ask(self, address: Any) -> None:
        """Ask for a cache line, to read, into the second cache.

        Not into the nearest: tokens may lie as far apart as its lines of one set do.
        """
        kind = ir.FunctionType(ir.VoidType(), [_BYTES, _INT32, _INT32, _INT32])
        prefetch = self._function("llvm.prefetch.p0i8", kind)
        how = [ir.Constant(_INT32, number) for number in (0, 2, 1)]
        self.builder.call(prefetch, [self.builder.inttoptr(address, _BYTES), *how])

    def least(self, a: Any, b: Any) -> Any:
        """The smaller integer."""
        return self.builder.select(self.builder.icmp_signed("<", a, b), a, b)

    def greatest(self, a: Any, b: Any) -> Any:
        """The greater of two floats or vectors."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def across(self, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """All elements of a vector combined."""
        lanes = LANES
        while lanes > 1:
            lanes //= 2
            low, high = (self.shuffle(vector, vector, range(n, n + lanes)) for n in (0, lanes))
            vector = combine(low, high)
        return self.builder.extract_element(vector, ir.Constant(_INT32, 0))

    def four_sums(self, vectors: list[Any]) -> Any:
        """The sums of the elements of each of four vectors, as one vector of four."""
        first, second = self._pairs(*vectors[:2]), self._pairs(*vectors[2:])
        both = self._pairs(first, second)
        low, high = (self.shuffle(both, both, range(n, n + 4)) for n in (0, 4))
        return self.builder.fadd(low, high)

    def transposed(self, rows: list[Any]) -> list[Any]:
        """Eight vectors as the columns of eight."""
        for distance in (4, 2, 1):
            lows = [n for n in range(LANES) if not n & distance]
            low = [n + LANES * bool(n & distance) - (n & distance) for n in range(LANES)]
            high = [n + distance for n in low]
            mixed = list(rows)
            for n in lows:
                pair = rows[n], rows[n + distance]
                mixed[n] = self.shuffle(*pair, low)
                mixed[n + distance] = self.shuffle(*pair, high)
            rows = mixed
        return rows

    def shuffle(self, a: Any, b: Any, lanes: Any) -> Any:
        """Chosen elements of two vectors."""
        chosen = list(lanes)
        mask = ir.Constant(ir.VectorType(_INT32, len(chosen)), chosen)
        return self.builder.shuffle_vector(a, b, mask)

    def exponential(self, x: Any) -> Any:
        """e^x of a vector of x <= 0; exactly 0 below -87. Relative error below 3e-7."""
        builder = self.builder
        floor = _constant(_LOWEST_EXPONENT)
        # NaN is not below, and stays.
        below = builder.fcmp_ordered("<", x, floor)
        x = builder.select(below, floor, x)
        n = self._call("nearbyint", VECTOR, builder.fmul(x, _constant(_LOG2E)))
        r = self.multiply_add(n, _constant(-_LN2_HIGH), x)
        r = self.multiply_add(n, _constant(-_LN2_LOW), r)
        power = _constant(_POLYNOMIAL[0])
        for coefficient in _POLYNOMIAL[1:]:
            power = self.multiply_add(power, r, _constant(coefficient))
        exponent = builder.add(builder.fptosi(n, _INT32S), _integers(127))
        scale = builder.bitcast(builder.shl(exponent, _integers(23)), VECTOR)
        return builder.select(below, _constant(0.0), builder.fmul(power, scale))

    def _pairs(self, a: Any, b: Any) -> Any:
        """Sums of neighbours within halves of a register: a, a, b, b, and the same above."""
        evens = self.shuffle(a, b, (0, 2, 8, 10, 4, 6, 12, 14))
        odds = self.shuffle(a, b, (1, 3, 9, 11, 5, 7, 13, 15))
        return self.builder.fadd(evens, odds)

    def _call(self, name: str, kind: Any, *arguments: Any) -> Any:
        suffix = "f32" if kind is FLOAT else f"v{LANES}f32"
        function = ir.FunctionType(kind, [kind] * len(arguments))
        return self.builder.call(self._function(f"llvm.{name}.{suffix}", function), arguments)

    def _function(self, name: str, kind: Any) -> Any:
        return cgutils.get_or_insert_function(self.builder.module, kind, name)  # type: ignore[no-untyped-call]


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
        nan = _constant(float("nan"))
        return builder.select(no_number, nan, builder.fmul(number, _constant(256.0)))


def integer(value: int) -> Any:
    """A constant."""
    return ir.Constant(INT, value)


def zeros() -> Any:
    """A vector of zeros."""
    return _constant(0.0)


def _constant(value: float) -> Any:
    return ir.Constant(VECTOR, [value] * LANES)


def _integers(value: int) -> Any:
    return ir.Constant(_INT32S, [value] * LANES)
