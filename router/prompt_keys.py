"""The block hashes of a prompt, at once: `kvferry.kv_events.chain_hashes` in one compiled loop.

A call of `hashlib` for each of 250 blocks is most of what a routing decision would cost. The hash
stays BLAKE2b: whoever chooses prompts for it must not find another prompt of a given hash, because
its events would make routers believe that a worker holds, or no longer holds, what others ask for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvferry.kv_events import chain_root
from router.compiled import compiled, inlined

if TYPE_CHECKING:
    from typing import TypeAlias

    from numpy.typing import NDArray

    from kvferry.ids import ExtraKey, TokenIds

    _Words: TypeAlias = tuple[np.uint64, ...]
    """16 of them."""

_IV = np.array(
    [
        0x6A09E667F3BCC908,
        0xBB67AE8584CAA73B,
        0x3C6EF372FE94F82B,
        0xA54FF53A5F1D36F1,
        0x510E527FADE682D1,
        0x9B05688C2B3E6C1F,
        0x1F83D9ABFB41BD6B,
        0x5BE0CD19137E2179,
    ],
    dtype=np.uint64,
)
_PARAMETERS = np.uint64(0x01010008)
"""Digest of 8 bytes, no key, no tree."""
_MESSAGE_WORDS = 16
_MESSAGE_BYTES = 8 * _MESSAGE_WORDS
_SHORT_WORDS = 9
"""Of a block of up to 16 tokens, the usual size, and the hash before it."""
_SHORT_BYTES = 8 * _SHORT_WORDS
_SEVEN_ZEROS = (np.uint64(0),) * (_MESSAGE_WORDS - _SHORT_WORDS)


@inlined
def _right(word: np.uint64, bits: np.uint64) -> np.uint64:
    return word >> bits | word << (np.uint64(64) - bits)


@inlined
def _mix(
    a: np.uint64, b: np.uint64, c: np.uint64, d: np.uint64, x: np.uint64, y: np.uint64
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    """The function G of the RFC."""
    a = a + b + x
    d = _right(d ^ a, np.uint64(32))
    c = c + d
    b = _right(b ^ c, np.uint64(24))
    a = a + b + y
    d = _right(d ^ a, np.uint64(16))
    c = c + d
    b = _right(b ^ c, np.uint64(63))
    return a, b, c, d


@inlined
def _turn(v: _Words, m: _Words) -> _Words:
    """A round of the RFC, with the words of the message in its order."""
    v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15 = v
    v0, v4, v8, v12 = _mix(v0, v4, v8, v12, m[0], m[1])
    v1, v5, v9, v13 = _mix(v1, v5, v9, v13, m[2], m[3])
    v2, v6, v10, v14 = _mix(v2, v6, v10, v14, m[4], m[5])
    v3, v7, v11, v15 = _mix(v3, v7, v11, v15, m[6], m[7])
    v0, v5, v10, v15 = _mix(v0, v5, v10, v15, m[8], m[9])
    v1, v6, v11, v12 = _mix(v1, v6, v11, v12, m[10], m[11])
    v2, v7, v8, v13 = _mix(v2, v7, v8, v13, m[12], m[13])
    v3, v4, v9, v14 = _mix(v3, v4, v9, v14, m[14], m[15])
    return v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15


@inlined
def _compress(h: _Words, m: _Words, read: int, total: int) -> _Words:
    """Take the message `m` into the state `h`, which is of 8 words; `read` of `total` bytes with
    it."""
    m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15 = m
    last = ~_IV[6] if read == total else _IV[6]
    low, high = _IV[:4], (_IV[4] ^ np.uint64(read), _IV[5], last, _IV[7])
    v: _Words = h + (low[0], low[1], low[2], low[3]) + high  # noqa: RUF005
    v = _turn(v, (m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15))
    v = _turn(v, (m14, m10, m4, m8, m9, m15, m13, m6, m1, m12, m0, m2, m11, m7, m5, m3))
    v = _turn(v, (m11, m8, m12, m0, m5, m2, m15, m13, m10, m14, m3, m6, m7, m1, m9, m4))
    v = _turn(v, (m7, m9, m3, m1, m13, m12, m11, m14, m2, m6, m5, m10, m4, m0, m15, m8))
    v = _turn(v, (m9, m0, m5, m7, m2, m4, m10, m15, m14, m1, m11, m12, m6, m8, m3, m13))
    v = _turn(v, (m2, m12, m6, m10, m0, m11, m8, m3, m4, m13, m7, m5, m15, m14, m1, m9))
    v = _turn(v, (m12, m5, m1, m15, m14, m13, m4, m10, m0, m7, m6, m3, m9, m2, m8, m11))
    v = _turn(v, (m13, m11, m7, m14, m12, m1, m3, m9, m5, m0, m15, m4, m8, m6, m2, m10))
    v = _turn(v, (m6, m15, m14, m9, m11, m3, m0, m8, m12, m2, m13, m7, m1, m4, m10, m5))
    v = _turn(v, (m10, m2, m8, m4, m7, m6, m1, m5, m15, m11, m9, m14, m3, m12, m13, m0))
    v = _turn(v, (m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15))
    v = _turn(v, (m14, m10, m4, m8, m9, m15, m13, m6, m1, m12, m0, m2, m11, m7, m5, m3))
    w = (v[0] ^ v[8], v[1] ^ v[9], v[2] ^ v[10], v[3] ^ v[11])
    x = (v[4] ^ v[12], v[5] ^ v[13], v[6] ^ v[14], v[7] ^ v[15])
    low_half = (h[0] ^ w[0], h[1] ^ w[1], h[2] ^ w[2], h[3] ^ w[3])
    return low_half + (h[4] ^ x[0], h[5] ^ x[1], h[6] ^ x[2], h[7] ^ x[3])  # noqa: RUF005


@compiled("uint64[::1](Array(uint32, 1, 'C', readonly=True), int64, uint64)")
def _chain(ids: NDArray[np.uint32], block_tokens: int, parent: np.uint64) -> NDArray[np.uint64]:
    """Each is BLAKE2b-64 (RFC 7693) over the hash before it and the ids of its block."""
    total = 8 + 4 * block_tokens
    message = np.zeros(-(-total // _MESSAGE_BYTES) * _MESSAGE_WORDS, dtype=np.uint64)
    found = np.empty(ids.size // block_tokens, dtype=np.uint64)
    h0: _Words = (_IV[0] ^ _PARAMETERS, _IV[1], _IV[2], _IV[3], _IV[4], _IV[5], _IV[6], _IV[7])
    for block in range(found.size):
        first = block * block_tokens
        message[0] = parent
        for pair in range(block_tokens // 2):
            low, high = ids[first + 2 * pair], ids[first + 2 * pair + 1]
            message[1 + pair] = np.uint64(low) | np.uint64(high) << np.uint64(32)
        if block_tokens % 2:
            message[1 + block_tokens // 2] = ids[first + block_tokens - 1]
        if total <= _SHORT_BYTES:
            # Words that are known to be zero are left out of the rounds: a tenth of the time.
            m = message[:_SHORT_WORDS]
            nine = (m[0], m[1], m[2], m[3], m[4], m[5], m[6], m[7], m[8])
            parent = _compress(h0, nine + _SEVEN_ZEROS, total, total)[0]
        else:
            h = h0
            for start in range(0, message.size, _MESSAGE_WORDS):
                m = message[start : start + _MESSAGE_WORDS]
                half = (m[0], m[1], m[2], m[3], m[4], m[5], m[6], m[7])
                rest = (m[8], m[9], m[10], m[11], m[12], m[13], m[14], m[15])
                h = _compress(h, half + rest, min(8 * start + _MESSAGE_BYTES, total), total)
            parent = h[0]
        found[block] = parent
    return found


def prompt_keys(token_ids: TokenIds, block_tokens: int, extra_key: ExtraKey) -> NDArray[np.uint64]:
    """Hashes of all full blocks of a prompt, first block first; [blocks]."""
    ids = np.ascontiguousarray(token_ids, dtype=np.int32).view(np.uint32)
    return _chain(ids, block_tokens, np.uint64(chain_root(extra_key)))
