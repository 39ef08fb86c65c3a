"""What an adapter adds to a product of a few tokens, in float32 on a CPU: one call for all of it.

Between the weights of two products nothing of torch's code stays in the near caches. Of few tokens
that is most of what torch's products take, and an adapter has two or more for each of the model's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine.native_math import kernel

if TYPE_CHECKING:
    from engine.native_math import F32, I64

TOKENS_MAX = 16
"""More of them go to torch, whose blocking pays then."""

_RANKS_AT_ONCE = 4
"""So that four products are added to each number that is read and written."""


@kernel
def add_low_rank(inputs: F32, down: F32, parts: I64, ups: F32, out: F32) -> None:
    """Add to out [T, columns] what inputs [T, in] give.

    down [ranks, in]. Each row of `parts` says of one module: its first rank, how many, its first
    column, how many, and where in `ups` [n] its matrix [ranks, columns] begins.
    """
    tokens = len(inputs)
    shrunk = np.empty((tokens, len(down)), dtype=np.float32)
    for rank in range(len(down)):
        row = down[rank]
        for token in range(tokens):
            given = inputs[token]
            total = np.float32(0)
            for at in range(len(given)):
                total += given[at] * row[at]
            shrunk[token, rank] = total
    for part in range(len(parts)):
        first, count, column, columns, start = parts[part]
        up = ups[start : start + count * columns].reshape(count, columns)
        whole = count - count % _RANKS_AT_ONCE
        for token in range(tokens):
            sums = out[token, column : column + columns]
            few = shrunk[token, first : first + count]
            for rank in range(0, whole, _RANKS_AT_ONCE):
                a, b, c, d = few[rank], few[rank + 1], few[rank + 2], few[rank + 3]
                row_a, row_b, row_c, row_d = up[rank], up[rank + 1], up[rank + 2], up[rank + 3]
                for at in range(len(sums)):
                    sums[at] += a * row_a[at] + b * row_b[at] + c * row_c[at] + d * row_d[at]
            for rank in range(whole, count):
                a, row_a = few[rank], up[rank]
                for at in range(len(sums)):
                    sums[at] += a * row_a[at]


def warm_up() -> None:
    """Compile or load it, before somebody waits for a step."""
    one = np.zeros((1, 1), dtype=np.float32)
    parts = np.asarray([[0, 1, 0, 1, 0]], dtype=np.int64)
    add_low_rank(one, one, parts, one[0], one.copy())
