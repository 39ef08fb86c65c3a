"""Overlap logit: NVIDIA Dynamo's KV-aware router of 2025, without its temperature."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from router.policies.pool import PoolView, Prompt

_OVERLAP_WEIGHT = 2.0


def overlap_logit(pool: PoolView, prompt: Prompt) -> NDArray[np.float64]:
    """Minus (2 x hit ratio - share of the KV in use - waiting / most waiting)."""
    hits = pool.hit_tokens / prompt.tokens
    usage = np.where(pool.slots > 0, pool.active_tokens / np.maximum(pool.slots, 1), 0.0)
    waiting = pool.requests / max(1, int(pool.requests.max()))
    return usage + waiting - _OVERLAP_WEIGHT * hits
