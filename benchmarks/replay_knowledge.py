"""What one of several routers knows of the replayed workers."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

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


@dataclass(order=True, slots=True)
class _News:
    at_s: float
    number: int
    kind: str = field(compare=False)
    dispatch: Dispatch = field(compare=False)


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
        self._news: list[_News] = []
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
        held = self._held[path].clip(0, self._node_blocks[path, np.newaxis])
        hits = held.sum(axis=0) * block_tokens
        hits = hits.clip(0, prompt.tokens - 1)
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
        late_s = delay_s or 0.0
        self._expect("sent", dispatch.at_s + late_s, dispatch)
        # A worker tells of what it will hold when it accepts a prompt, but of what it gave up for
        # that only when it did.
        self._expect("held", dispatch.at_s + late_s, dispatch)
        lost_s = dispatch.at_s if delay_s is None else dispatch.finished_s + late_s
        self._expect("lost", lost_s, dispatch)
        self._expect("finished", dispatch.finished_s + late_s, dispatch)

    def _expect(self, kind: str, at_s: float, dispatch: Dispatch) -> None:
        heapq.heappush(self._news, _News(at_s, next(self._numbers), kind, dispatch))

    def _catch_up(self, now: float) -> None:
        while self._news and self._news[0].at_s <= now:
            news = heapq.heappop(self._news)
            dispatch = news.dispatch
            worker = dispatch.worker
            if news.kind == "sent":
                begins_s = max(self._free_at[worker], dispatch.at_s)
                self._free_at[worker] = begins_s + dispatch.service_s
                self._requests[worker] += 1
                self._active[worker] += dispatch.tokens
            elif news.kind == "finished":
                self._requests[worker] -= 1
                self._active[worker] -= dispatch.tokens
            else:
                for node, blocks in dispatch.changes:
                    if (blocks > 0) == (news.kind == "held"):
                        self._held[node, worker] += blocks
