"""What a router remembers of its own decisions, in bounded memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from router.compiled import compiled
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

_NO_LEVELS = NO_HEAT.level_tokens, NO_HEAT.level_requests


class PlacementHistory:
    """Feeds the columns of `PoolView` that are about the past."""

    def __init__(self, *, reads_sent: bool = False) -> None:
        """`reads_sent`: `sent_tokens` is asked for."""
        self.turn = 0
        """Decisions recorded."""
        self.typical_tokens = 0.0
        """Tokens that a prompt had to have computed, in the mean of late; 0: none yet."""
        self._heat = PrefixHeat(HEAT_MEMORY_REQUESTS)
        self._pending = PendingPrompts(PENDING_S, PENDING_BYTES_MAX)
        self._sent = SentPrefixes(SENT_PREFIXES_PER_WORKER_MAX) if reads_sent else None

    def heat(self, prompt: Prompt, hit_tokens: NDArray[np.int64]) -> Heat:
        """Of the prefixes of `prompt` that workers hold."""
        levels, counts = _NO_LEVELS
        if prompt.keys.size:
            levels, positions = _levels_of(hit_tokens, prompt.ends)
            counts = self._heat.counts(prompt.keys[positions])
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
        self._heat.add(prompt.keys)
        self._pending.add(worker, prompt, now)
        if self._sent is not None:
            self._sent.add(worker, prompt)


@compiled("UniTuple(int64[::1], 2)(int64[:], int64[:])")
def _levels_of(
    hit_tokens: NDArray[np.int64], ends: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The different ones, rising, without 0: they are few. And where the shortest prefix of so many
    tokens is, or the longest one there is."""
    found = np.empty(hit_tokens.size, dtype=np.int64)
    count = 0
    for tokens in hit_tokens:
        at = count
        while at > 0 and found[at - 1] > tokens:
            at -= 1
        if tokens == 0 or (at > 0 and found[at - 1] == tokens):
            continue
        for moved in range(count, at, -1):
            found[moved] = found[moved - 1]
        found[at] = tokens
        count += 1
    positions = np.empty(count, dtype=np.int64)
    at = 0
    for level in range(count):
        while at < ends.size - 1 and ends[at] < found[level]:
            at += 1
        positions[level] = at
    return found[:count].copy(), positions
