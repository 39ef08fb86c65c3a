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
        self._keys = np.zeros(places, dtype=np.uint64)
        self._counts = np.zeros(places, dtype=np.float64)
        """Weighted; 0: the place is free."""
        self._sinces = np.zeros(places, dtype=np.float64)
        """Weighted clock at the first request."""
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
            for column in (self._counts, self._sinces):
                column /= self._weight
            self._clock /= self._weight
            self._weight = 1.0
        return _add(self._keys, self._counts, self._sinces, keys, self._weight, self._clock)

    def heat(self, prompt: Prompt, hit_tokens: NDArray[np.int64], now: float) -> Heat:
        """Of the prefixes of `prompt` that have as many tokens as a worker holds."""
        columns, chain = (self._keys, self._counts, self._sinces), (prompt.keys, prompt.ends)
        scale, clock = 1.0 / self._weight, self._clock_at(now)
        return Heat(*_heat(columns, chain, hit_tokens, scale, clock))

    def _clock_at(self, now: float) -> float:
        return self._clock + self._weight * (0.0 if self._last is None else now - self._last)


@inlined
def _place(keys: NDArray[np.uint64], key: np.uint64) -> np.int64:
    """Where the prefix is, or else the second place that it may have."""
    # Multiplied, because keys are hashes where they come from prompts, but small numbers in a
    # replay. The upper bits of a product depend on all bits of a key.
    mixed = key * _FACTOR
    mask = np.uint64(keys.size - 1)
    first = np.int64((mixed >> np.uint64(40)) & mask)
    return first if keys[first] == key else np.int64((mixed >> np.uint64(20)) & mask)


@compiled(
    "int64(uint64[::1], float64[::1], float64[::1], Array(uint64, 1, 'C', readonly=True),"
    " float64, float64)"
)
def _add(
    owners: NDArray[np.uint64],
    counts: NDArray[np.float64],
    sinces: NDArray[np.float64],
    keys: NDArray[np.uint64],
    weight: float,
    clock: float,
) -> int:
    known = 0
    while known < keys.size:
        place = _place(owners, keys[known])
        if owners[place] != keys[known] or counts[place] == 0.0:
            break
        known += 1
    mask = np.uint64(owners.size - 1)
    for key in keys:
        place = _place(owners, key)
        if owners[place] != key:
            first = np.int64((key * _FACTOR >> np.uint64(40)) & mask)
            if counts[first] < counts[place]:
                place = first
            owners[place] = key
            counts[place] = 0.0
        if counts[place] == 0.0:
            sinces[place] = clock
        counts[place] += weight
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
    "Tuple((uint64[::1], float64[::1], float64[::1])),"
    " Tuple((Array(uint64, 1, 'C', readonly=True), Array(int64, 1, 'C', readonly=True))),"
    " int64[:], float64, float64)"
)
def _heat(
    columns: tuple[NDArray[np.uint64], NDArray[np.float64], NDArray[np.float64]],
    chain: tuple[NDArray[np.uint64], NDArray[np.int64]],
    hit_tokens: NDArray[np.int64],
    scale: float,
    clock: float,
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """The columns of `Heat`. A level goes by the key of the shortest prefix of so many tokens, or
    of the longest one there is."""
    owners, counts, sinces = columns
    keys, ends = chain
    levels = _levels_of(hit_tokens)
    requests, seconds = np.zeros(levels.size), np.zeros(levels.size)
    at = 0
    for level in range(levels.size):
        while at < ends.size - 1 and ends[at] < levels[level]:
            at += 1
        place = _place(owners, keys[at])
        if owners[place] == keys[at] and counts[place] > 0.0:
            requests[level] = counts[place] * scale
            seconds[level] = (clock - sinces[place]) * scale
    return levels, requests, seconds
