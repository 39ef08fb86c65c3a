"""How often prefixes were asked for lately, in bounded memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ROWS = 2
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
        self._table = np.zeros((_ROWS, counters), dtype=np.float64)
        self._mask = np.uint64(counters - 1)
        # Instead of making all older counts smaller, each new one is larger.
        self._step = 1.0 + 1.0 / memory_requests
        self._weight = 1.0
        self._total = 0.0

    @property
    def requests(self) -> float:
        """Requests counted, older ones less."""
        return self._total / self._weight

    def add(self, keys: NDArray[np.uint64]) -> None:
        """Count a request with these prefixes."""
        self._weight *= self._step
        if self._weight > _GROWTH_MAX:
            self._table /= self._weight
            self._total /= self._weight
            self._weight = 1.0
        for row, positions in enumerate(self._positions(keys)):
            self._table[row, positions] += self._weight
        self._total += self._weight

    def counts(self, keys: NDArray[np.uint64]) -> NDArray[np.float64]:
        """Requests that had each prefix; shape as `keys`."""
        first, second = self._positions(keys)
        least: NDArray[np.float64] = np.minimum(self._table[0, first], self._table[1, second])
        return least / self._weight

    def _positions(self, keys: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], ...]:
        # Keys are hashes already where they come from prompts; small numbers in a replay are not.
        mixed = keys * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(32)
        return mixed & self._mask, (mixed >> np.uint64(24)) & self._mask
