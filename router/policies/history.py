"""What a router remembers of its own decisions, in bounded memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from router.policies.pool import Heat
from router.policies.prefix_heat import PrefixHeat
from router.policies.sent_prefixes import SentPrefixes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from router.policies.pool import Prompt

HEAT_MEMORY_REQUESTS = 1000
"""Long enough that the share of one in 64 prefixes is known to a quarter, short enough that what
was hot an hour ago is not held hot."""

_TYPICAL_WEIGHT = 1 / 200
"""Of the newest prompt in the mean."""

PENDING_PREFIXES_PER_WORKER_MAX = 1 << 13
"""Enough for what a worker has not computed yet: at 16 tokens a block 131,072 tokens. About 150
bytes each, so at most 80 MB for 64 workers."""

SENT_PREFIXES_PER_WORKER_MAX = 1 << 16
"""Where a policy takes what was sent for what is held: a million tokens per worker, at most
640 MB for 64 workers."""


class PlacementHistory:
    """Feeds the columns of `PoolView` that are about the past."""

    def __init__(self, *, reads_sent: bool = False) -> None:
        """`reads_sent`: `sent_tokens` is asked for more than what is pending."""
        self.turn = 0
        """Decisions recorded."""
        self.typical_tokens = 0.0
        """Tokens that a prompt had to have computed, in the mean of late; 0: none yet."""
        self._heat = PrefixHeat(HEAT_MEMORY_REQUESTS)
        self._sent = SentPrefixes(
            SENT_PREFIXES_PER_WORKER_MAX if reads_sent else PENDING_PREFIXES_PER_WORKER_MAX
        )

    def heat(self, prompt: Prompt, hit_tokens: NDArray[np.int64]) -> Heat:
        """Of the prefixes of `prompt` that workers hold."""
        levels = np.unique(np.minimum(hit_tokens, prompt.tokens))
        levels = levels[levels > 0]
        if not prompt.keys.size:
            levels = levels[:0]
        positions = np.searchsorted(prompt.ends, levels).clip(max=max(0, prompt.keys.size - 1))
        counts = self._heat.counts(prompt.keys[positions])
        return Heat(levels, counts, self._heat.requests)

    def sent_tokens(
        self, workers: Sequence[int], prompt: Prompt, since: Sequence[float]
    ) -> NDArray[np.int64]:
        """Leading tokens of `prompt` that each worker was sent at or after `since`."""
        return self._sent.tokens(workers, prompt, since)

    def record(self, worker: int, prompt: Prompt, computed_tokens: int, now: float) -> None:
        """A prompt was placed; the worker has `computed_tokens` of it to compute."""
        weight = max(_TYPICAL_WEIGHT, 1 / (self.turn + 1))
        self.typical_tokens += weight * (computed_tokens - self.typical_tokens)
        self.turn += 1
        self._heat.add(prompt.keys)
        self._sent.add(worker, prompt, now)
