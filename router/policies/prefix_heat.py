"""How often prefixes were asked for lately, in bounded memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ROWS = 2
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_GROWTH_MAX = 1e12
"""Counts are divided by this before they come near the end of a float's precision."""


class PrefixHeat:
    """Counts requests per prefix, each of which halves in weight after `memory_requests * ln 2`.

    A table of counters under two hashes per prefix; of the two the smaller is taken, so a count
    may only come out too high, and only if both counters are shared with other prefixes.
    """

    def __init__(self, memory_requests: int, counters: int = 1 << 18) -> None:
        """`counters` is a power of two; memory is 16 bytes for each."""
        assert counters & (counters - 1) == 0
        self._table = np.zeros(_ROWS * counters, dtype=np.float64)
        """Row after row."""
        self._mask = np.uint64(counters - 1)
        self._second_row = np.uint64(counters)
        bits = counters.bit_length() - 1
        self._first_shift = np.uint64(64 - bits)
        self._second_shift = np.uint64(64 - 2 * bits)
        # Instead of making all older counts smaller, each new one is larger.
        self._step = 1.0 + 1.0 / memory_requests
        self._weight = 1.0
        self._total = 0.0

    @property
    def requests(self) -> float:
        """Requests counted, older ones less."""
        return self._total / self._weight

    def counters(self, keys: NDArray[np.uint64]) -> NDArray[np.intp]:
        """Where both counts of each prefix are; [2, keys]."""
        # Multiplied, because keys are hashes where they come from prompts, but in a replay small
        # numbers. The upper bits of a product depend on all bits of the key.
        products = keys * _FACTOR
        found = np.empty((_ROWS, keys.size), dtype=np.uint64)
        np.right_shift(products, self._first_shift, out=found[0])
        products >>= self._second_shift
        products &= self._mask
        np.bitwise_or(products, self._second_row, out=found[1])
        return found.view(np.intp)

    def add(self, counters: NDArray[np.intp]) -> None:
        """Count a request with the prefixes that have these counters."""
        self._weight *= self._step
        if self._weight > _GROWTH_MAX:
            self._table /= self._weight
            self._total /= self._weight
            self._weight = 1.0
        # Two prefixes of one prompt that share a counter count once there.
        self._table[counters] += self._weight
        self._total += self._weight

    def counts(self, counters: NDArray[np.intp]) -> NDArray[np.float64]:
        """Requests that had each of the prefixes that have these counters; [prefixes]."""
        first, second = self._table[counters]
        least: NDArray[np.float64] = np.minimum(first, second)
        return least / self._weight
