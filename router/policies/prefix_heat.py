"""How often prefixes were asked for lately, in bounded memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from router.compiled import compiled, inlined

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
        self._table = np.zeros((_ROWS, counters), dtype=np.float64)
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
        _add(self._table, keys, self._weight)
        self._total += self._weight

    def counts(self, keys: NDArray[np.uint64]) -> NDArray[np.float64]:
        """Requests that had each prefix; shape as `keys`."""
        return _counts(self._table, keys, 1.0 / self._weight)


@inlined
def _first(key: np.uint64, counters: int) -> np.uint64:
    # Multiplied, because keys are hashes where they come from prompts, but small numbers in a
    # replay. The upper bits of a product depend on all bits of a key.
    return (key * _FACTOR) >> np.uint64(40) & np.uint64(counters - 1)


@inlined
def _second(key: np.uint64, counters: int) -> np.uint64:
    return (key * _FACTOR) >> np.uint64(20) & np.uint64(counters - 1)


@compiled("void(float64[:, ::1], Array(uint64, 1, 'C', readonly=True), float64)")
def _add(table: NDArray[np.float64], keys: NDArray[np.uint64], weight: float) -> None:
    counters = table.shape[1]
    for key in keys:
        table[0, _first(key, counters)] += weight
        table[1, _second(key, counters)] += weight


@compiled("float64[::1](float64[:, ::1], Array(uint64, 1, 'C', readonly=True), float64)")
def _counts(
    table: NDArray[np.float64], keys: NDArray[np.uint64], scale: float
) -> NDArray[np.float64]:
    counters = table.shape[1]
    found = np.empty(keys.size, dtype=np.float64)
    for position, key in enumerate(keys):
        first, second = table[0, _first(key, counters)], table[1, _second(key, counters)]
        found[position] = min(first, second) * scale
    return found
