"""Random: all are equal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from router.policies.pool import PoolView, Prompt


def random_choice(pool: PoolView, prompt: Prompt) -> NDArray[np.float64]:
    """Nothing; equal costs are drawn at random."""
    del prompt
    return np.zeros(pool.workers)
