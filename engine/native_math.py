"""What the native kernels share: types, compiler settings, and an exponential that vectorizes.

Numba's cache of a kernel does not notice changes in here: after one, delete `__pycache__`.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numba
import numpy as np
from numpy.typing import NDArray

F32: TypeAlias = NDArray[np.float32]
I32: TypeAlias = NDArray[np.int32]
I64: TypeAlias = NDArray[np.int64]

FASTMATH = {"reassoc", "contract", "nsz", "arcp"}
"""Sums may be reordered, which vector instructions need; infinities and NaN keep their meaning."""

_LOG2E = np.float32(1.4426950408889634)
_LN2 = np.float32(0.6931471805599453)
_EXP_LOWEST = np.float32(-87.0)
"""exp of less is below the smallest normal float32."""


@numba.njit(inline="always", fastmath=FASTMATH)
def exp_negative(x: Any) -> Any:
    """e^x of a float32 x <= 0; relative error below 1e-6.

    2^n from the exponent bits times a Taylor polynomial of what is left. Unlike a call of libm's
    `expf`, it lets a loop over it become vector instructions.
    """
    x = max(x, _EXP_LOWEST)
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


@numba.njit(inline="always")
def part(total: int, index: int, parts: int) -> Any:
    """(start, stop) of one of `parts` nearly equal parts of range(total)."""
    return total * index // parts, total * (index + 1) // parts
