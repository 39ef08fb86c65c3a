"""Least loaded: fewest requests in flight."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from router.policies.pool import PoolView, Prompt


def least_loaded(pool: PoolView, prompt: Prompt) -> NDArray[np.float64]:
    """Requests in flight."""
    del prompt
    return pool.requests.astype(np.float64)
