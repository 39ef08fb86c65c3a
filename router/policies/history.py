"""What a router remembers of its own decisions, in bounded memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from router.policies.pending_prompts import PendingPrompts
from router.policies.pool import NO_HEAT, Heat
from router.policies.prefix_heat import PrefixHeat
from router.policies.sent_prefixes import SentPrefixes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from router.policies.pool import Prompt

HEAT_MEMORY_REQUESTS = 1000
"""Long enough that the share of one in 64 prefixes is known to a quarter, short enough that what
was hot an hour ago is not held hot."""

_TYPICAL_WEIGHT = 1 / 200
"""Of the newest prompt in the mean."""

PENDING_S = 10.0
"""A prompt sent no longer ago than this to a worker that has prompts to compute may be one of
them."""

PENDING_BYTES_MAX = 64 * 2**20
"""Of the prompts sent within twice that time: a prompt of 4,000 tokens takes about 4 kB among 64
workers, so 800 of them a second."""

SENT_PREFIXES_PER_WORKER_MAX = 1 << 16
"""Where a policy takes what was sent for what is held: a million tokens per worker, at most
500 MB for 64 workers."""


class PlacementHistory:
    """Feeds the columns of `PoolView` that are about the past."""

    def __init__(self, *, reads_sent: bool = False) -> None:
        """`reads_sent`: `sent_tokens` is asked for."""
        self.turn = 0
        """Decisions recorded."""
        self.typical_tokens = 0.0
        """Tokens that a prompt had to have computed, in the mean of late; 0: none yet."""
        self._heat = PrefixHeat(HEAT_MEMORY_REQUESTS)
        self._counters: tuple[Prompt | None, NDArray[np.intp]] = None, np.empty((2, 0), np.intp)
        """Of the prompt of late: one is looked at, then recorded."""
        self._pending = PendingPrompts(PENDING_S, PENDING_BYTES_MAX)
        self._sent = SentPrefixes(SENT_PREFIXES_PER_WORKER_MAX) if reads_sent else None

    def heat(self, prompt: Prompt, hit_tokens: NDArray[np.int64]) -> Heat:
        """Of the prefixes of `prompt` that workers hold."""
        lengths = set(hit_tokens.tolist())
        lengths.discard(0)
        if not lengths or not prompt.keys.size:
            return Heat(NO_HEAT.level_tokens, NO_HEAT.level_requests, self._heat.requests)
        levels = np.array(sorted(lengths), dtype=np.int64)
        positions = prompt.ends.searchsorted(levels)
        np.minimum(positions, prompt.keys.size - 1, out=positions)
        counts = self._heat.counts(self._counters_of(prompt)[:, positions])
        return Heat(levels, counts, self._heat.requests)

    def pending_tokens(
        self, workers: NDArray[np.uint64], prompt: Prompt, since: NDArray[np.float64]
    ) -> NDArray[np.int64]:
        """Leading tokens of `prompt` that each worker was sent at or after `since`, which is no
        longer ago than `PENDING_S`."""
        return self._pending.tokens(workers, prompt, since)

    def sent_tokens(self, workers: Iterable[int], prompt: Prompt) -> NDArray[np.int64]:
        """Leading tokens of `prompt` that each worker was ever sent."""
        assert self._sent is not None, "not asked for when this was made"
        return self._sent.tokens(workers, prompt)

    def record(self, worker: int, prompt: Prompt, computed_tokens: int, now: float) -> None:
        """A prompt was placed; the worker has `computed_tokens` of it to compute."""
        weight = max(_TYPICAL_WEIGHT, 1 / (self.turn + 1))
        self.typical_tokens += weight * (computed_tokens - self.typical_tokens)
        self.turn += 1
        self._heat.add(self._counters_of(prompt))
        self._pending.add(worker, prompt, now)
        if self._sent is not None:
            self._sent.add(worker, prompt)

    def _counters_of(self, prompt: Prompt) -> NDArray[np.intp]:
        if self._counters[0] is not prompt:
            self._counters = prompt, self._heat.counters(prompt.keys)
        return self._counters[1]
