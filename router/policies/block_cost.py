"""Block cost: NVIDIA Dynamo's later rule, prefill blocks to compute plus blocks in use."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from router.policies.pool import PoolView, Prompt


def block_cost(pool: PoolView, prompt: Prompt) -> NDArray[np.float64]:
    """Tokens queued, tokens to compute and tokens in use; a block is a constant factor."""
    return pool.ttft_ms(prompt) * pool.tokens_per_ms + pool.active_tokens
