"""Least predicted TTFT of this request alone: algorithm 1 of Mooncake (FAST 2025)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from router.policies.pool import PoolView, Prompt


def min_ttft(pool: PoolView, prompt: Prompt) -> NDArray[np.float64]:
    """Milliseconds of queue and of own uncached tokens."""
    return pool.ttft_ms(prompt)
