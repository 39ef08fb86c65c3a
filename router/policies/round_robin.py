"""Round robin: one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from router.policies.pool import PoolView, Prompt


def round_robin(pool: PoolView, prompt: Prompt) -> NDArray[np.float64]:
    """Places to go from the worker whose turn it is."""
    del prompt
    return ((np.arange(pool.workers) - pool.turn) % pool.workers).astype(np.float64)
