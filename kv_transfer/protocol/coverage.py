"""Which layers of which tokens of a handoff have arrived."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kv_transfer.protocol.errors import BadMessage

if TYPE_CHECKING:
    from kv_transfer.protocol.region import Region


class Coverage:
    """Counts cells (a token in a layer) that are still to come. Each must come exactly once.

    Each token's layers come in order; the order of the tokens is free.
    """

    def __init__(self, token_start: int, token_stop: int, num_layers: int) -> None:
        assert 0 <= token_start <= token_stop
        self.remaining = (token_stop - token_start) * num_layers
        self._start = token_start
        self._stop = token_stop
        self._num_layers = num_layers
        self._next_layer = np.zeros(token_stop - token_start, dtype=np.int16)

    def check(self, region: Region) -> None:
        """Raise `BadMessage` unless exactly this region may come next."""
        inside = self._start <= region.token_start and region.token_stop <= self._stop
        if not inside or region.layer_stop > self._num_layers:
            raise BadMessage(
                f"{region} where tokens [{self._start}, {self._stop}) of {self._num_layers}"
                " layers were granted"
            )
        if not (self._of(region) == region.layer_start).all():
            raise BadMessage(f"{region} is not what comes next for each of its tokens")

    def take(self, region: Region) -> None:
        """A region that has passed `check` is here."""
        self._of(region)[:] = region.layer_stop
        self.remaining -= region.cells

    def _of(self, region: Region) -> np.ndarray:
        return self._next_layer[region.token_start - self._start : region.token_stop - self._start]
