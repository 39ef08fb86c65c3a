"""How often prefixes were asked for lately, and over what time, in bounded memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from router.compiled import compiled, inlined
from router.policies.pool import Heat

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from router.policies.pool import Prompt

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_KEY, _COUNT, _SINCE = 0, 1, 2
_GROWTH_MAX = 1e12
"""Weights are divided by this before they come near the end of a float's precision."""


class PrefixUses:
    """Counts requests per prefix, each of which halves in weight after `memory_requests * ln 2`.

    The time that a prefix has been known is weighted like its requests, so that their quotient is
    its rate of late however long it has been known. Each prefix has two places in a table; where
    others have both, the less used of them is forgotten. What is told is never too high.
    """

    def __init__(self, memory_requests: int, places: int = 1 << 19) -> None:
        """`places` is a power of two; memory is 24 bytes for each."""
        assert places & (places - 1) == 0
        # All of a place lies together: of 250 prefixes, most are in no cache.
        self._table = np.zeros((places, 3), dtype=np.float64)
        """The key's 64 bits; how many requests, weighted, of which 0 says that the place is free;
        and the weighted clock at the first of them."""
        self._keys = self._table.view(np.uint64)
        # Instead of making all that is older smaller, what is new is larger.
        self._step = 1.0 + 1.0 / memory_requests
        self._weight = 1.0
        self._clock = 0.0
        self._last: float | None = None

    def add(self, keys: NDArray[np.uint64], now: float) -> int:
        """Count a request with these prefixes; `now` does not fall, in seconds. How many of them,
        from the shortest on, were asked for before."""
        self._clock = self._clock_at(now)
        self._last = now
        self._weight *= self._step
        if self._weight > _GROWTH_MAX:
            self._table[:, _COUNT:] /= self._weight
            self._clock /= self._weight
            self._weight = 1.0
        return _add(self._keys, self._table, keys, self._weight, self._clock)

    def heat(self, prompt: Prompt, hit_tokens: NDArray[np.int64], now: float) -> Heat:
        """Of the prefixes of `prompt` that have as many tokens as a worker holds."""
        chain, scale, clock = (prompt.keys, prompt.ends), 1.0 / self._weight, self._clock_at(now)
        return Heat(*_heat(self._keys, self._table, chain, hit_tokens, scale, clock))

    def _clock_at(self, now: float) -> float:
        return self._clock + self._weight * (0.0 if self._last is None else now - self._last)


@inlined
def _place(keys: NDArray[np.uint64], key: np.uint64) -> tuple[np.int64, np.int64]:
    """Where the prefix is, or else the second place that it may have; and the first one."""
    # Multiplied, because keys are hashes where they come from prompts, but small numbers in a
    # replay. The upper bits of a product depend on all bits of a key.
    mixed = key * _FACTOR
    mask = np.uint64(keys.shape[0] - 1)
    first = np.int64((mixed >> np.uint64(40)) & mask)
    if keys[first, _KEY] == key:
        return first, first
    return np.int64((mixed >> np.uint64(20)) & mask), first


@compiled(
    "int64(uint64[:, ::1], float64[:, ::1], Array(uint64, 1, 'C', readonly=True), float64, float64)"
)
def _add(
    owners: NDArray[np.uint64],
    table: NDArray[np.float64],
    keys: NDArray[np.uint64],
    weight: float,
    clock: float,
) -> int:
    """`owners` and `table` are the same memory. How many of the first keys were there."""
    known, are_known = 0, True
    for key in keys:
        place, first = _place(owners, key)
        if owners[place, _KEY] != key:
            if table[first, _COUNT] < table[place, _COUNT]:
                place = first
            owners[place, _KEY] = key
            table[place, _COUNT] = 0.0
        if table[place, _COUNT] == 0.0:
            table[place, _SINCE] = clock
            are_known = False
        known += are_known
        table[place, _COUNT] += weight
    return known


@inlined
def _levels_of(hit_tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """The different ones, rising, without 0: they are few."""
    found = np.empty(hit_tokens.size, dtype=np.int64)
    count = 0
    for tokens in hit_tokens:
        at = count
        while at > 0 and found[at - 1] > tokens:
            at -= 1
        if tokens == 0 or (at > 0 and found[at - 1] == tokens):
            continue
        for moved in range(count, at, -1):
            found[moved] = found[moved - 1]
        found[at] = tokens
        count += 1
    return found[:count]


@compiled(
    "Tuple((int64[::1], float64[::1], float64[::1]))("
    "uint64[:, ::1], float64[:, ::1],"
    " Tuple((Array(uint64, 1, 'C', readonly=True), Array(int64, 1, 'C', readonly=True))),"
    " int64[:], float64, float64)"
)
def _heat(
    owners: NDArray[np.uint64],
    table: NDArray[np.float64],
    chain: tuple[NDArray[np.uint64], NDArray[np.int64]],
    hit_tokens: NDArray[np.int64],
    scale: float,
    clock: float,
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """The columns of `Heat`. A level goes by the key of the shortest prefix of so many tokens, or
    of the longest one there is."""
    keys, ends = chain
    levels = _levels_of(hit_tokens)
    requests, seconds = np.zeros(levels.size), np.zeros(levels.size)
    at = 0
    for level in range(levels.size):
        while at < ends.size - 1 and ends[at] < levels[level]:
            at += 1
        place, _ = _place(owners, keys[at])
        if owners[place, _KEY] == keys[at] and table[place, _COUNT] > 0.0:
            requests[level] = table[place, _COUNT] * scale
            seconds[level] = (clock - table[place, _SINCE]) * scale
    return levels, requests, seconds
