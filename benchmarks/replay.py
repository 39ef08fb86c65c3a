"""Replays a trace against N simulated prefill workers behind K routers.

A worker is a FIFO of 8,000 uncached tokens/s plus 5 ms per prompt, with a page cache of its own,
least recently used first. An answer takes 10 ms per token after the first, which only delays what
follows it. Requests with recorded times arrive at those, all scaled by one factor; sessions begin
evenly at random and then go on closed loop: previous answer, think time, next request. The
arrivals are spread over `work / (load * workers)`, where `work` is what a cache without bounds,
shared by all, would leave to be computed: at load .5 such a cache keeps workers half busy.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.replay_cache import WorkerCaches
from benchmarks.replay_knowledge import Dispatch, RouterKnowledge
from router.compiled import compiled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from bench.traces import Trace
    from router.policies.catalogue import Policy

TOKENS_PER_S = 8000.0
REQUEST_S = 0.005
ANSWER_TOKEN_S = 0.010
_TIE = 1e-6


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """One run."""

    workers: int
    seed: int
    load: float = 0.5
    routers: int = 1
    event_delay_s: float = 0.1
    """By which a router hears of what others dispatched, of what workers will hold when they have
    computed it, and of what they gave up."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Figures of one run."""

    hit_rate: float
    """Of all prompt tokens."""
    work_max_mean: float
    """Busiest worker's time over the mean."""
    ttft_s: NDArray[np.float64]
    """Of each request in order of arrival."""

    def quantile_s(self, share: float) -> float:
        """TTFT."""
        return float(np.quantile(self.ttft_s, share))


class Workload:
    """A trace with what is computed of it once for all runs."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.prompt_tokens = sum(request.prompt_tokens for request in trace.requests)
        self.work_s = self._work_s()

    def _work_s(self) -> float:
        tree, block_tokens = self.trace.tree, self.trace.block_tokens
        cache = WorkerCaches(tree.node_blocks, 1, int(tree.node_blocks.sum()) + 1)
        uncached = 0
        for request, path in zip(self.trace.requests, tree.paths, strict=True):
            hit = int(cache.hit_blocks(path)[0]) * block_tokens
            uncached += max(1, request.prompt_tokens - hit)
            cache.store(0, path)
        return uncached / TOKENS_PER_S + REQUEST_S * len(self.trace.requests)

    def offered_tok_s_worker(self, load: float) -> float:
        """Prompt tokens per second and worker."""
        return self.prompt_tokens * load / self.work_s

    def arrivals_s(self, settings: ReplaySettings) -> NDArray[np.float64]:
        """Of the requests that follow no other."""
        span_s = self.work_s / (settings.load * settings.workers)
        starts = self.trace.starts
        if self.trace.is_open_loop:
            times = np.array([self.trace.requests[start].at_s for start in starts], dtype=float)
            times -= times.min()
            return times * (span_s / max(times.max(), 1e-9))
        rng = np.random.default_rng([settings.seed, len(starts)])
        return np.sort(rng.random(len(starts))) * span_s


class Replay:
    """One run of one policy."""

    def __init__(self, workload: Workload, policy: Policy, settings: ReplaySettings) -> None:
        trace, workers = workload.trace, settings.workers
        nodes = trace.tree.node_blocks
        self._workload = workload
        self._trace = trace
        self._policy = policy
        self._settings = settings
        self._rng = np.random.default_rng(settings.seed)
        self._caches = WorkerCaches(nodes, workers, trace.cache_tokens // trace.block_tokens)
        self._routers = [
            RouterKnowledge(policy, nodes, workers, trace.cache_tokens, TOKENS_PER_S / 1000.0)
            for _ in range(settings.routers)
        ]
        self._free_at = np.zeros(workers)
        self._worked_s = np.zeros(workers)
        self._computed_tokens = 0

    def run(self) -> ReplayResult:
        """The figures; equal for equal seeds."""
        ttft_s = np.fromiter(self._ttfts_s(), dtype=np.float64)
        return ReplayResult(
            hit_rate=1.0 - self._computed_tokens / self._workload.prompt_tokens,
            work_max_mean=float(self._worked_s.max() / self._worked_s.mean()),
            ttft_s=ttft_s,
        )

    def holds(self, share: float, limit_s: float) -> bool:
        """Whether that quantile of TTFT is within the limit; ends as soon as it cannot be."""
        requests = len(self._trace.requests)
        # So many beyond the limit, and the quantile lies between two of them.
        too_many = requests - math.floor(share * (requests - 1))
        ttft_s: list[float] = []
        late = 0
        for each in self._ttfts_s():
            ttft_s.append(each)
            late += each > limit_s
            if late == too_many:
                return False
        return float(np.quantile(ttft_s, share)) <= limit_s

    def _ttfts_s(self) -> Iterator[float]:
        """Of each request, in order of arrival, as it is placed."""
        times = self._workload.arrivals_s(self._settings)
        queue = list(zip(times.tolist(), self._trace.starts, strict=True))
        heapq.heapify(queue)
        while queue:
            now, number = heapq.heappop(queue)
            request = self._trace.requests[number]
            first_s = self._serve(now, number)
            ended_s = first_s + ANSWER_TOKEN_S * max(0, request.answer_tokens - 1)
            for follower in request.followers:
                think_s = self._trace.requests[follower].think_s
                heapq.heappush(queue, (ended_s + think_s, follower))
            yield first_s - now

    def _serve(self, now: float, number: int) -> float:
        """Route a request and have it computed; returns when its first token comes."""
        trace = self._trace
        prompt, path = trace.prompts[number], trace.tree.paths[number]
        chosen_by = 0
        if len(self._routers) > 1:
            chosen_by = int(self._rng.integers(len(self._routers)))
        router = self._routers[chosen_by]
        view = router.view(now, prompt, path, trace.block_tokens)
        worker = self._draw_cheapest(self._policy.costs(view, prompt))
        expected = max(1, prompt.tokens - int(view.hit_tokens[worker]))
        router.history.record(worker, prompt, expected, int(view.hit_tokens.max()), now)
        dispatch = self._compute(now, worker, number)
        for other, knowledge in enumerate(self._routers):
            knowledge.hear(dispatch, None if other == chosen_by else self._settings.event_delay_s)
        return dispatch.finished_s

    def _compute(self, now: float, worker: int, number: int) -> Dispatch:
        # A FIFO: what is before it in the queue is in the cache when its turn comes.
        path = self._trace.tree.paths[number]
        tokens = self._trace.requests[number].prompt_tokens
        hit = int(self._caches.held[path, worker].sum()) * self._trace.block_tokens
        uncached = max(1, tokens - hit)
        service_s = uncached / TOKENS_PER_S + REQUEST_S
        changes = self._caches.store(worker, path)
        finished_s = max(now, float(self._free_at[worker])) + service_s
        self._free_at[worker] = finished_s
        self._worked_s[worker] += service_s
        self._computed_tokens += uncached
        return Dispatch(worker, tokens, now, service_s, finished_s, changes)

    def _draw_cheapest(self, costs: NDArray[np.float64]) -> int:
        cheapest = _cheapest(costs)
        drawn = self._rng.integers(cheapest.size) if cheapest.size > 1 else 0
        return int(cheapest[drawn])


@compiled("int64[::1](float64[::1])")
def _cheapest(costs: NDArray[np.float64]) -> NDArray[np.int64]:
    """Positions of those that are as good as the least."""
    bound = costs.min() + _TIE
    found = np.empty(costs.size, dtype=np.int64)
    count = 0
    for position in range(costs.size):
        if costs[position] <= bound:
            found[count] = position
            count += 1
    return found[:count]
