"""What the native kernels share: types, decorators, and an exponential that vectorizes.

Numba's cache of a kernel does not notice changes of what is written as LLVM instructions
(over `engine.instructions`, and in `engine.native_memory`): after one, delete `__pycache__`.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

from engine.compile_turn import CompileTurn
from kvferry.code_digest import name_by_content

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FunctionType

_P = ParamSpec("_P")
_R = TypeVar("_R")

F32: TypeAlias = NDArray[np.float32]
I32: TypeAlias = NDArray[np.int32]
I64: TypeAlias = NDArray[np.int64]

_FASTMATH = {"reassoc", "contract", "nsz", "arcp"}
"""Sums may be reordered, which vector instructions need; infinities and NaN keep their meaning."""

_LOG2E = np.float32(1.4426950408889634)
_LN2 = np.float32(0.6931471805599453)
_EXP_LIMIT = np.float32(87.0)
"""e^-87 is about the smallest normal float32, e^87 about the largest."""


def kernel(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile a function called from Python; the machine code is cached on disk."""
    name_by_content(cast("FunctionType", function), sorted(_FASTMATH))
    return _compile(function, cache=True, nogil=True)


class Task:
    """A kernel with an address, called as `task(arguments, index)`; see `engine.crew.share`."""

    def __init__(self, function: Callable[[int, int], int]) -> None:
        self._function = cast("FunctionType", function)
        self._compiled: Any = None
        name_by_content(self._function, sorted(_FASTMATH))

    @property
    def address(self) -> int:
        """Of the machine code: the first who asks waits until it is compiled, or found on disk."""
        if self._compiled is None:
            with self._turn.held(wait=True):
                self._compile()
        return cast("int", self._compiled.address)

    @property
    def is_compiled(self) -> bool:
        """Whether it is on disk."""
        return self._turn.is_over

    def compile_if_free(self) -> None:
        """Have it ready, unless another process is compiling it."""
        with self._turn.held(wait=False) as is_ours:
            if is_ours:
                self._compile()

    @cached_property
    def _turn(self) -> CompileTurn:
        closed_over = [cell.cell_contents for cell in self._function.__closure__ or ()]
        return CompileTurn(self._function, "".join(f"-{value}" for value in closed_over))

    def _compile(self) -> None:
        decorate = numba.cfunc(
            "int64(int64, int64)", cache=True, fastmath=_FASTMATH, error_model="numpy"
        )
        self._compiled = decorate(self._function)


def task(function: Callable[[int, int], int]) -> Task:
    """A part of shared work. It gets the address of its arguments and its own number.

    It returns 0, and raises nothing: who calls it cannot handle an exception.
    """
    return Task(function)


def inlined(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile a function into the kernels that call it."""
    return _compile(function, inline="always")


def _compile(function: Callable[_P, _R], **options: Any) -> Callable[_P, _R]:
    # numpy's error model: a check for division by zero would keep a loop from being vectorized.
    decorate = numba.njit(fastmath=_FASTMATH, error_model="numpy", **options)
    return cast("Callable[_P, _R]", decorate(function))


@inlined
def exp(x: Any) -> Any:
    """e^x of a float32 x, taken to be within +-87; relative error below 1e-5.

    2^n from the exponent bits times a Taylor polynomial of what is left. Unlike a call of libm's
    `expf`, it lets a loop over it become vector instructions.
    """
    x = min(max(x, -_EXP_LIMIT), _EXP_LIMIT)
    n = np.floor(x * _LOG2E + np.float32(0.5))
    r = x - n * _LN2
    p = np.float32(1 / 5040)
    p = p * r + np.float32(1 / 720)
    p = p * r + np.float32(1 / 120)
    p = p * r + np.float32(1 / 24)
    p = p * r + np.float32(1 / 6)
    p = p * r + np.float32(1 / 2)
    p = p * r + np.float32(1)
    p = p * r + np.float32(1)
    bits = np.int32((np.int32(n) + 127) << 23)
    return p * bits.view(np.float32)
