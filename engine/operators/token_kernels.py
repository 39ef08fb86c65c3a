"""Loops over the tokens of a step, by a crew. Shapes as in `operators.interface`.

Arrays are float32 and contiguous, and given by their addresses, as to products: an array would cost
more to pass than a token costs to compute. Arguments are words (`crew.share_words`), in the order
in which each task takes them apart.
"""

from __future__ import annotations

import struct

import numpy as np

from engine.native_math import F32, exp, inlined, task
from engine.native_memory import array_at, words_at

_PART_ELEMENTS = 4 * 1024
"""In one part of the work: some microseconds, more than handing it over takes."""
_GELU_SCALE = 2 * np.float32((2 / np.pi) ** 0.5)
_GELU_CUBE = np.float32(0.044715)


def _tokens_in_part(width: int) -> int:
    return max(1, _PART_ELEMENTS // width)


_tokens_of = inlined(_tokens_in_part)


def parts_of(tokens: int, width: int) -> int:
    """Of the work on tokens of `width` elements each: heads of q, k and v count together."""
    return -(-tokens // _tokens_in_part(width))


def as_word(number: float) -> int:
    """How a number is passed among words."""
    return int(struct.unpack("q", struct.pack("d", number))[0])


@inlined
def _as_number(word: int) -> np.float32:
    return np.float32(np.int64(word).view(np.float64))


@inlined
def _scale(squares: np.float32, width: int, eps: np.float32) -> np.float32:
    """By what a vector is multiplied, of its sum of squares."""
    return np.float32(1.0 / np.sqrt(squares / np.float32(width) + eps))


@task
def rms_norm_part(arguments: int, index: int) -> int:
    """out = inputs / rms(inputs) * weight."""
    inputs, weight, out, tokens, width, eps = words_at(arguments, 6)
    weights = array_at(weight, width, np.float32)
    count = _tokens_of(width)
    for t in range(index * count, min(tokens, (index + 1) * count)):
        x = array_at(inputs + 4 * t * width, width, np.float32)
        normed = array_at(out + 4 * t * width, width, np.float32)
        squares = np.float32(0)
        for k in range(width):
            squares += x[k] * x[k]
        scale = _scale(squares, width, _as_number(eps))
        for k in range(width):
            normed[k] = x[k] * scale * weights[k]
    return 0


@task
def add_rms_norm_part(arguments: int, index: int) -> int:
    """residual += update; out = residual / rms(residual) * weight."""
    residual, update, weight, out, tokens, width, eps = words_at(arguments, 7)
    weights = array_at(weight, width, np.float32)
    count = _tokens_of(width)
    for t in range(index * count, min(tokens, (index + 1) * count)):
        total = array_at(residual + 4 * t * width, width, np.float32)
        added = array_at(update + 4 * t * width, width, np.float32)
        normed = array_at(out + 4 * t * width, width, np.float32)
        squares = np.float32(0)
        for k in range(width):
            x = total[k] + added[k]
            total[k] = x
            squares += x * x
        scale = _scale(squares, width, _as_number(eps))
        for k in range(width):
            normed[k] = total[k] * scale * weights[k]
    return 0


@task
def norm_heads_part(arguments: int, index: int) -> int:
    """qkv [T, heads, width], of which 2 kv_heads are keys and values: each head of q and k over its
    rms, times the weight of its kind. In place."""
    qkv, query_weight, key_weight, tokens, heads, kv_heads, width, eps = words_at(arguments, 8)
    of_query = array_at(query_weight, width, np.float32)
    of_key = array_at(key_weight, width, np.float32)
    count = _tokens_of(heads * width)
    for t in range(index * count, min(tokens, (index + 1) * count)):
        token = array_at(qkv + 4 * t * heads * width, (heads, width), np.float32)
        for h in range(heads - kv_heads):
            weights = of_query if h < heads - 2 * kv_heads else of_key
            head = token[h]
            squares = np.float32(0)
            for d in range(width):
                squares += head[d] * head[d]
            scale = _scale(squares, width, _as_number(eps))
            for d in range(width):
                head[d] = head[d] * scale * weights[d]
    return 0


@task
def silu_part(arguments: int, index: int) -> int:
    """out [T, width] = silu(gate) * up, where gate_up [T, 2 width] holds gate, then up."""
    gate_up, out, tokens, width = words_at(arguments, 4)
    count = _tokens_of(width)
    for t in range(index * count, min(tokens, (index + 1) * count)):
        gate = array_at(gate_up + 8 * t * width, width, np.float32)
        up = array_at(gate_up + 8 * t * width + 4 * width, width, np.float32)
        gated = array_at(out + 4 * t * width, width, np.float32)
        for k in range(width):
            x = gate[k]
            gated[k] = x / (np.float32(1) + exp(-x)) * up[k]
    return 0


@task
def gelu_part(arguments: int, index: int) -> int:
    """As `silu_part`, of gelu by way of tanh."""
    gate_up, out, tokens, width = words_at(arguments, 4)
    count = _tokens_of(width)
    for t in range(index * count, min(tokens, (index + 1) * count)):
        gate = array_at(gate_up + 8 * t * width, width, np.float32)
        up = array_at(gate_up + 8 * t * width + 4 * width, width, np.float32)
        gated = array_at(out + 4 * t * width, width, np.float32)
        for k in range(width):
            x = gate[k]
            # (1 + tanh(u)) / 2 is 1 / (1 + e^-2u).
            twice = _GELU_SCALE * (x + _GELU_CUBE * x * x * x)
            gated[k] = x / (np.float32(1) + exp(-twice)) * up[k]
    return 0


@inlined
def _rotate(head: F32, angles: F32, out: F32) -> None:
    """Rotate the pairs (d, d + D/2); angles [D]: cosines, then sines."""
    half = len(head) // 2
    for d in range(half):
        first, second = head[d], head[half + d]
        cosine, sine = angles[d], angles[half + d]
        out[d] = first * cosine - second * sine
        out[half + d] = second * cosine + first * sine


@task
def rope_part(arguments: int, index: int) -> int:
    """qkv [T, H + 2 H_kv, D] -> queries [T, H, D] rotated; k rotated and v into their slots."""
    qkv, rope, positions, slots, keys, values, queries, tokens, num_heads, kv_heads, width = (
        words_at(arguments, 11)
    )
    heads = num_heads + 2 * kv_heads
    of_tokens, places = array_at(positions, tokens, np.int64), array_at(slots, tokens, np.int64)
    count = _tokens_of(heads * width)
    for t in range(index * count, min(tokens, (index + 1) * count)):
        token = array_at(qkv + 4 * t * heads * width, (heads, width), np.float32)
        angles = array_at(rope + 4 * of_tokens[t] * width, width, np.float32)
        rotated = array_at(queries + 4 * t * num_heads * width, (num_heads, width), np.float32)
        stored = 4 * places[t] * kv_heads * width
        of_keys = array_at(keys + stored, (kv_heads, width), np.float32)
        of_values = array_at(values + stored, (kv_heads, width), np.float32)
        for h in range(num_heads):
            _rotate(token[h], angles, rotated[h])
        for h in range(kv_heads):
            _rotate(token[num_heads + h], angles, of_keys[h])
            value, place = token[num_heads + kv_heads + h], of_values[h]
            for d in range(width):
                place[d] = value[d]
    return 0
