"""What kernels are told of a pool: where units lie and how they are decoded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine.attention.vectors import FORMS
from engine.instructions import LANES
from kvferry.config import KvArrangement
from kvferry.errors import ConfigError
from mem_cache.layout import KvLayout

if TYPE_CHECKING:
    from mem_cache.kv_pool import KvPool

EVERYTHING = 2**62
"""A window that no position leaves."""


class StoredKv:
    """A pool as attention reads it.

    `window`: how many tokens, itself included, each token attends to; None: all up to itself.
    `score_cap` c: scores x become c tanh(x / c).
    """

    def __init__(self, pool: KvPool, window: int | None, score_cap: float | None) -> None:
        layout = pool.layout
        assert isinstance(layout, KvLayout), "our models have K and V"
        if layout.head_dim < LANES:
            raise ConfigError("model", f"has heads of {layout.head_dim} elements; 8 are the least")
        by_head = layout.order is KvArrangement.HND
        self._pool = pool
        self.form = FORMS[layout.dtype]
        self.window = EVERYTHING if window is None else window
        self.heads = layout.num_kv_heads
        self.width = layout.head_dim
        self._cap = np.array([np.inf if score_cap is None else score_cap], dtype=np.float32)
        self.numbers = (
            self._cap.ctypes.data,
            self.window,
            layout.head_dim,
            layout.page_size,
            layout.num_kv_heads,
            1 if by_head else layout.num_kv_heads,
            layout.page_size if by_head else 1,
            layout.unit_bytes,
        )
        """For kernels: the address of the cap (infinite: none), the window, a head's width, the
        page size, KV heads, units from a token to the next and from a head to the next, and bytes
        of a unit."""

    def addresses(self, layer: int) -> tuple[int, int]:
        """Where K and V of a layer begin."""
        keys, values = self._pool.layer(layer)
        assert keys.is_contiguous(), "kernels read it by its address"
        assert values.is_contiguous(), "kernels read it by its address"
        return keys.data_ptr(), values.data_ptr()
