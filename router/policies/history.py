"""What a router remembers of its own decisions, and for seconds of others', in bounded memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.policies.pending_prompts import PendingPrompts
from router.policies.pool import NO_HEAT
from router.policies.prefix_uses import PrefixUses
from router.policies.sent_prefixes import SentPrefixes

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray

    from router.policies.pool import Heat, Prompt

USES_MEMORY_REQUESTS = 2000
"""Long enough that a prefix of one request in a hundred has paid for a copy, short enough that
what was hot an hour ago is not held hot."""

_RECENT_WEIGHT = 1 / 200
"""Of the newest prompt in means of late."""

PENDING_S = 10.0
"""A prompt sent no longer ago than this to a worker that has prompts to compute may be one of
them."""

PENDING_BYTES_MAX = 64 * 2**20
"""Of the prompts sent within twice that time, by any router: a prompt of 4,000 tokens takes about
4 kB among 64 workers, so 800 of them a second."""

SENT_PREFIXES_PER_WORKER_MAX = 1 << 16
"""Where a policy takes what was sent for what is held: a million tokens per worker, at most
500 MB for 64 workers."""


class PlacementHistory:
    """Feeds the columns of `PoolView` that are about the past."""

    def __init__(self, *, reads_sent: bool = False, reads_heat: bool = True) -> None:
        """`reads_sent`: `sent_tokens` is asked for. `reads_heat`: `heat` and the means are."""
        self.turn = 0
        """Decisions recorded."""
        self.typical_tokens = 0.0
        """Tokens that a prompt had to have computed, in the mean of late; 0: none yet."""
        self.lost_share = 0.0
        """Of late prompts, the part that was known and that no worker held anymore; the mean."""
        self._uses = PrefixUses(USES_MEMORY_REQUESTS) if reads_heat else None
        self._pending = PendingPrompts(PENDING_S, PENDING_BYTES_MAX)
        self._sent = SentPrefixes(SENT_PREFIXES_PER_WORKER_MAX) if reads_sent else None

    def heat(self, prompt: Prompt, hit_tokens: NDArray[np.int64], now: float) -> Heat:
        """Of the prefixes of `prompt` that workers hold."""
        assert self._uses is not None, "not asked for when this was made"
        return self._uses.heat(prompt, hit_tokens, now) if prompt.keys.size else NO_HEAT

    def hits_with_pending(
        self,
        hit_tokens: NDArray[np.int64],
        workers: NDArray[np.uint64],
        prompt: Prompt,
        since: NDArray[np.float64],
    ) -> NDArray[np.int64]:
        """Leading tokens of `prompt` that each worker holds, or was sent, by this router or as it
        told, at or after `since`, which is no longer ago than `PENDING_S`."""
        return self._pending.tokens(workers, prompt, since, hit_tokens)

    def sent_tokens(self, workers: Iterable[int], prompt: Prompt) -> NDArray[np.int64]:
        """Leading tokens of `prompt` that each worker was ever sent."""
        assert self._sent is not None, "not asked for when this was made"
        return self._sent.tokens(workers, prompt)

    def expect(self, worker: int, prompt: Prompt, now: float) -> None:
        """A worker told that it will compute a prompt, whoever sent it."""
        self._pending.add(worker, prompt, now)

    def record(
        self, worker: int, prompt: Prompt, computed_tokens: int, held_tokens: int, now: float
    ) -> None:
        """A prompt was placed; the worker has `computed_tokens` of it to compute, and the most
        that any worker holds of it is `held_tokens`."""
        if self._uses is not None:
            self._count(self._uses, prompt, computed_tokens, held_tokens, now)
        self.turn += 1
        self._pending.add(worker, prompt, now)
        if self._sent is not None:
            self._sent.add(worker, prompt)

    def _count(
        self, uses: PrefixUses, prompt: Prompt, computed_tokens: int, held_tokens: int, now: float
    ) -> None:
        weight = max(_RECENT_WEIGHT, 1 / (self.turn + 1))
        self.typical_tokens += weight * (computed_tokens - self.typical_tokens)
        known = uses.add(prompt.keys, now)
        known_tokens = min(prompt.ends.item(known - 1), prompt.tokens - 1) if known else 0
        lost = max(known_tokens - held_tokens, 0) / max(prompt.tokens, 1)
        self.lost_share += weight * (lost - self.lost_share)
