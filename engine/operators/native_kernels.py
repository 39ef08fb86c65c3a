"""Loops over float32 arrays, compiled once and cached. Shapes as in `operators.interface`."""

from __future__ import annotations

import numba
import numpy as np

from engine.native_math import F32, I64, exp, inlined, kernel, parallel_kernel, part

_COLUMNS = 4
"""Weight rows taken together: each load of an input is used four times, and the four rows stay in
L1 over all inputs, so that a weight comes from memory once."""


@kernel
def linear_part(inputs: F32, weight: F32, out: F32, start: int, stop: int) -> None:
    """out[:, start:stop] = inputs . weight[start:stop]^T."""
    tokens, width = inputs.shape
    whole = start + (stop - start) // _COLUMNS * _COLUMNS
    if tokens == 1:
        # One stream through the weight is what memory likes best.
        whole = start
    for n in range(start, whole, _COLUMNS):
        row0, row1, row2, row3 = weight[n], weight[n + 1], weight[n + 2], weight[n + 3]
        for t in range(tokens):
            row = inputs[t]
            dot0 = dot1 = dot2 = dot3 = np.float32(0)
            for k in range(width):
                x = row[k]
                dot0 += x * row0[k]
                dot1 += x * row1[k]
                dot2 += x * row2[k]
                dot3 += x * row3[k]
            out[t, n], out[t, n + 1], out[t, n + 2], out[t, n + 3] = dot0, dot1, dot2, dot3
    for n in range(whole, stop):
        for t in range(tokens):
            dot = np.float32(0)
            for k in range(width):
                dot += inputs[t, k] * weight[n, k]
            out[t, n] = dot


@parallel_kernel
def linear_parallel(inputs: F32, weight: F32, out: F32, threads: int) -> None:
    """`linear_part` over all of `weight`, split by its rows."""
    for index in numba.prange(threads):
        start, stop = part(len(weight), index, threads)
        linear_part(inputs, weight, out, start, stop)


@kernel
def rms_norm(inputs: F32, weight: F32, eps: float, out: F32) -> None:
    """out = inputs / rms(inputs) * weight."""
    tokens, width = inputs.shape
    for t in range(tokens):
        squares = np.float32(0)
        for k in range(width):
            squares += inputs[t, k] * inputs[t, k]
        scale = np.float32(1.0 / np.sqrt(squares / np.float32(width) + np.float32(eps)))
        for k in range(width):
            out[t, k] = inputs[t, k] * scale * weight[k]


@kernel
def add_rms_norm(residual: F32, update: F32, weight: F32, eps: float, out: F32) -> None:
    """residual += update; out = residual / rms(residual) * weight."""
    tokens, width = residual.shape
    for t in range(tokens):
        squares = np.float32(0)
        for k in range(width):
            x = residual[t, k] + update[t, k]
            residual[t, k] = x
            squares += x * x
        scale = np.float32(1.0 / np.sqrt(squares / np.float32(width) + np.float32(eps)))
        for k in range(width):
            out[t, k] = residual[t, k] * scale * weight[k]


@kernel
def norm_heads(qkv: F32, query_weight: F32, key_weight: F32, kv_heads: int, eps: float) -> None:
    """qkv [T, H + 2 H_kv, D]: each head of q and k over its rms, times the weight [D] of its kind.

    In place.
    """
    tokens, heads, width = qkv.shape
    for t in range(tokens):
        for h in range(heads - kv_heads):
            weight = query_weight if h < heads - 2 * kv_heads else key_weight
            head = qkv[t, h]
            squares = np.float32(0)
            for d in range(width):
                squares += head[d] * head[d]
            scale = np.float32(1.0 / np.sqrt(squares / np.float32(width) + np.float32(eps)))
            for d in range(width):
                head[d] = head[d] * scale * weight[d]


@kernel
def silu_and_mul(gate_up: F32, out: F32) -> None:
    """out = silu(gate) * up, where gate_up [T, 2 m] holds gate, then up."""
    tokens, width = out.shape
    for t in range(tokens):
        for k in range(width):
            x = gate_up[t, k]
            out[t, k] = x / (np.float32(1) + exp(-x)) * gate_up[t, width + k]


@kernel
def rope_and_write(
    qkv: F32, rope: F32, positions: I64, slots: I64, keys: F32, values: F32, queries: F32
) -> None:
    """qkv [T, H + 2 H_kv, D] -> queries [T, H, D] rotated; k rotated and v into their slots."""
    tokens, num_heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    for t in range(tokens):
        angles = rope[positions[t]]
        for h in range(num_heads):
            _rotate(qkv[t, h], angles, queries[t, h])
        for h in range(kv_heads):
            _rotate(qkv[t, num_heads + h], angles, keys[slots[t], h])
            value = qkv[t, num_heads + kv_heads + h]
            for d in range(head_dim):
                values[slots[t], h, d] = value[d]


@inlined
def _rotate(head: F32, angles: F32, out: F32) -> None:
    """Rotate the pairs (d, d + D/2); angles [D]: cosines, then sines."""
    half = len(head) // 2
    for d in range(half):
        first, second = head[d], head[half + d]
        cosine, sine = angles[d], angles[half + d]
        out[d] = first * cosine - second * sine
        out[half + d] = second * cosine + first * sine
