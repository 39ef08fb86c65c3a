"""What one of several routers knows of the replayed workers."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from router.compiled import compiled
from router.policies.history import PlacementHistory
from router.policies.pool import NO_HEAT, PoolView, Prompt

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from router.policies.catalogue import Policy


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One prompt given to a worker, as all routers will know it in the end."""

    worker: int
    tokens: int
    at_s: float
    service_s: float
    finished_s: float
    changes: list[tuple[int, int]]
    """(node, blocks gained or lost) in the worker's cache."""


class RouterKnowledge:
    """Its own dispatches count at once, all else when the news of it arrives."""

    def __init__(
        self,
        policy: Policy,
        node_blocks: NDArray[np.int64],
        workers: int,
        cache_tokens: int,
        tokens_per_ms: float,
    ) -> None:
        self.history = PlacementHistory(reads_sent=policy.reads_sent)
        self._policy = policy
        self._node_blocks = node_blocks
        self._held = np.zeros((node_blocks.size, workers), dtype=np.int64)
        """Of each node's blocks, those told of less those told to be lost: for a while more than
        there are, where a node comes back and its loss has not been told yet."""
        self._free_at = np.zeros(workers)
        self._requests = np.zeros(workers, dtype=np.int64)
        self._active = np.zeros(workers, dtype=np.int64)
        self._news: list[tuple[float, int, str, Dispatch]] = []
        """When it will be heard, its number among all, of what kind, and what of."""
        self._numbers = itertools.count()
        self._slots = np.full(workers, cache_tokens, dtype=np.int64)
        self._rates = np.full(workers, tokens_per_ms)
        rng = np.random.default_rng(workers)
        self._names = rng.integers(1, 1 << 63, workers, dtype=np.uint64)

    def view(
        self, now: float, prompt: Prompt, path: NDArray[np.int64], block_tokens: int
    ) -> PoolView:
        """The snapshot at `now`, in seconds."""
        self._catch_up(now)
        hits = _hit_tokens(self._held, self._node_blocks, path, block_tokens, prompt.tokens)
        sent = hits
        if self._policy.reads_sent:
            sent = self.history.sent_tokens(range(hits.size), prompt)
        return PoolView(
            names=self._names,
            hit_tokens=hits,
            queue_ms=np.maximum(self._free_at - now, 0.0) * 1000.0,
            tokens_per_ms=self._rates,
            requests=self._requests,
            active_tokens=self._active,
            slots=self._slots,
            sent_tokens=sent,
            turn=self.history.turn,
            typical_tokens=self.history.typical_tokens,
            lost_share=self.history.lost_share,
            heat=self.history.heat(prompt, hits, now) if self._policy.reads_heat else NO_HEAT,
        )

    def hear(self, dispatch: Dispatch, delay_s: float | None) -> None:
        """Of a dispatch: its own (None), or one whose news come late by `delay_s`."""
        # A worker tells of what it will hold when it accepts a prompt, but of what it gave up for
        # that only when it did.
        if delay_s is None:
            for kind in ("sent", "held", "lost"):
                self._learn(kind, dispatch)
            self._expect("finished", dispatch.finished_s, dispatch)
            return
        self._expect("sent", dispatch.at_s + delay_s, dispatch)
        self._expect("held", dispatch.at_s + delay_s, dispatch)
        self._expect("lost", dispatch.finished_s + delay_s, dispatch)
        self._expect("finished", dispatch.finished_s + delay_s, dispatch)

    def _expect(self, kind: str, at_s: float, dispatch: Dispatch) -> None:
        heapq.heappush(self._news, (at_s, next(self._numbers), kind, dispatch))

    def _catch_up(self, now: float) -> None:
        while self._news and self._news[0][0] <= now:
            _, _, kind, dispatch = heapq.heappop(self._news)
            self._learn(kind, dispatch)

    def _learn(self, kind: str, dispatch: Dispatch) -> None:
        worker = dispatch.worker
        if kind == "sent":
            begins_s = max(self._free_at[worker], dispatch.at_s)
            self._free_at[worker] = begins_s + dispatch.service_s
            self._requests[worker] += 1
            self._active[worker] += dispatch.tokens
        elif kind == "finished":
            self._requests[worker] -= 1
            self._active[worker] -= dispatch.tokens
        else:
            for node, blocks in dispatch.changes:
                if (blocks > 0) == (kind == "held"):
                    self._held[node, worker] += blocks


@compiled("int64[::1](int64[:, ::1], int64[::1], int64[:], int64, int64)")
def _hit_tokens(
    held: NDArray[np.int64],
    node_blocks: NDArray[np.int64],
    path: NDArray[np.int64],
    block_tokens: int,
    prompt_tokens: int,
) -> NDArray[np.int64]:
    """Of the prompt with the nodes `path`, that each worker holds, as far as is known."""
    found = np.zeros(held.shape[1], dtype=np.int64)
    for node in path:
        for worker in range(found.size):
            found[worker] += min(max(held[node, worker], 0), node_blocks[node])
    for worker in range(found.size):
        found[worker] = min(found[worker] * block_tokens, prompt_tokens - 1)
    return found
