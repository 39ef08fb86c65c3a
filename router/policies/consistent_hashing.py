"""Consistent hashing of the first tokens of the prompt.

By highest random weight (Thaler and Ravishankar, 1998): every worker has a weight for every key,
the largest wins; a worker that leaves moves nobody but its own keys.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from router.policies.pool import PoolView, Prompt

HEAD_TOKENS = 256
_LOAD_BOUND = 1.25
"""Of the mean; Mirrokni, Thorup and Zadimoghaddam, "Consistent hashing with bounded loads"."""


def consistent_hashing(pool: PoolView, prompt: Prompt) -> NDArray[np.float64]:
    """Rank of each worker for the first `HEAD_TOKENS` tokens."""
    return _ranks(pool, prompt.key_at(HEAD_TOKENS))


def consistent_hashing_bounded(pool: PoolView, prompt: Prompt) -> NDArray[np.float64]:
    """As above; workers at 1.25 x the mean load come after all others."""
    bound = math.ceil(_LOAD_BOUND * (int(pool.requests.sum()) + 1) / pool.workers)
    is_full = pool.requests + 1 > bound
    return _ranks(pool, prompt.key_at(HEAD_TOKENS)) + np.where(is_full, pool.workers, 0)


def session_hashing(pool: PoolView, prompt: Prompt) -> NDArray[np.float64]:
    """Rank of each worker for the session."""
    return _ranks(pool, prompt.session)


def _ranks(pool: PoolView, key: int) -> NDArray[np.float64]:
    mixed = pool.names ^ np.uint64(key * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF)
    # The finalizer of SplitMix64: names and keys that differ in one bit have unrelated weights.
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    weights = mixed ^ (mixed >> np.uint64(31))
    ranks = np.empty(pool.workers, dtype=np.float64)
    ranks[np.argsort(weights)] = np.arange(pool.workers)
    return ranks
