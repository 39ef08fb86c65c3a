"""What a policy sees: the workers that could compute a prompt, as columns, at one moment.

Named tuples, because every decision makes them: a frozen dataclass takes six times as long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from router.compiled import compiled

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Prompt(NamedTuple):
    """A prompt as the chain of its prefixes, shortest first."""

    tokens: int
    keys: NDArray[np.uint64]
    """Names each prefix; equal keys are equal prefixes. May be empty: nothing may be shared."""
    ends: NDArray[np.int64]
    """Tokens of each prefix; rising."""
    session: int = 0
    """Names the conversation; 0: unknown."""

    def key_at(self, tokens: int) -> int:
        """Of the shortest prefix with so many tokens, or of the longest there is; 0 for none."""
        if not self.keys.size:
            return 0
        position = int(np.searchsorted(self.ends, tokens))
        return int(self.keys[min(position, self.keys.size - 1)])


class Heat(NamedTuple):
    """How often the parts of a prompt were asked for, by this router, lately."""

    level_tokens: NDArray[np.int64]
    """Rising lengths of prefixes that workers hold, each length once, none of them 0."""
    level_requests: NDArray[np.float64]
    """Requests that had the prefix of that length; older ones count less."""
    level_seconds: NDArray[np.float64]
    """Since the first of them; what is long ago counts less, as the requests do."""


NO_HEAT = Heat(np.empty(0, dtype=np.int64), np.empty(0), np.empty(0))


class PoolView(NamedTuple):
    """The workers to choose from; every column has one entry per worker, in the same order."""

    names: NDArray[np.uint64]
    """A hash of each worker's name."""
    hit_tokens: NDArray[np.int64]
    """Leading prompt tokens that it holds, or will hold when it has computed its queue."""
    queue_ms: NDArray[np.float64]
    """Until it would begin with this prompt."""
    tokens_per_ms: NDArray[np.float64]
    requests: NDArray[np.int64]
    """In flight."""
    active_tokens: NDArray[np.int64]
    """Prompt tokens of the requests in flight."""
    slots: NDArray[np.int64]
    """KV slots in all; 0: unknown."""
    sent_tokens: NDArray[np.int64]
    """Leading prompt tokens that this router has sent there before."""
    turn: int
    """Decisions made before this one."""
    typical_tokens: float
    """Tokens that a prompt had to have computed, in the mean of late; 0: none yet."""
    lost_share: float
    """Of late prompts, the part that had been asked for before and that no worker held anymore."""
    heat: Heat

    @property
    def workers(self) -> int:
        """How many there are."""
        return int(self.names.size)

    def uncached_tokens(self, prompt: Prompt) -> NDArray[np.int64]:
        """Tokens that each worker would compute; at least one always is."""
        return np.maximum(prompt.tokens - self.hit_tokens, 1)

    def ttft_ms(self, prompt: Prompt) -> NDArray[np.float64]:
        """Predicted time until each worker has computed the prompt."""
        return _ttft_ms(self.queue_ms, self.hit_tokens, self.tokens_per_ms, prompt.tokens)


@compiled("float64[::1](float64[:], int64[:], float64[:], int64)")
def _ttft_ms(
    queue_ms: NDArray[np.float64],
    hit_tokens: NDArray[np.int64],
    tokens_per_ms: NDArray[np.float64],
    prompt_tokens: int,
) -> NDArray[np.float64]:
    found = np.empty(queue_ms.size, dtype=np.float64)
    for worker in range(queue_ms.size):
        uncached = max(prompt_tokens - hit_tokens[worker], 1)
        found[worker] = queue_ms[worker] + uncached / tokens_per_ms[worker]
    return found
