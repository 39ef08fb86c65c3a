"""The cache-aware policy of sglang-router, which takes no events: what was sent is what is held."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from router.policies.pool import PoolView, Prompt

_MATCH_RATIO = 0.3


def tree_policy(difference: int, ratio: float) -> Callable[[PoolView, Prompt], NDArray[np.float64]]:
    """Loads are out of balance when they differ by more than both bounds."""

    def costs(pool: PoolView, prompt: Prompt) -> NDArray[np.float64]:
        """Requests in flight where loads are out of balance or little matches; else the tokens
        that were not sent there."""
        loads = pool.requests
        most, least = int(loads.max()), int(loads.min())
        is_balanced = most - least <= difference or most <= ratio * least
        match = pool.sent_tokens
        best = int(match.max())
        if is_balanced and best > _MATCH_RATIO * prompt.tokens:
            return (best - match).astype(np.float64)
        return loads.astype(np.float64)

    return costs


approximate_tree = tree_policy(64, 1.5)
"""The defaults."""
approximate_tree_tight = tree_policy(4, 1.2)
"""A variant that balances sooner."""
