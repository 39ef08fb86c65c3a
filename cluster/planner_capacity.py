"""What prompts and answers take of workers, if the targets are to be kept. Pure.

**Load** of a role is what is asked of its workers over the most that they could do within the
target; 1 is the edge, 2 needs twice as many. It says both whether a split of the workers will do
and, of two that will not, which does better.

Prompts queue. Workers that compute `rate` tokens/s each are taken for the servers of one queue, to
which the router's choice of the least busy one comes close. Of c servers at utilization u a prompt
waits longer than t with the probability

    u^(sqrt(2(c + 1)) - 1) * exp(-2 c (1 - u) t / (s (1 + v)))

where s is the time of one prompt and v its variation (Sakasegawa's approximation of the mean wait,
and an exponential tail). A prompt has the target less its own time to wait; the most that c workers
can do is the u at which `attainment` of the prompts wait no longer than that. Prompts that wait
already have to be computed besides, within `_DRAIN_S` or the target if that is longer.

Answers share steps. A step takes a + b n seconds for n sequences (`StepTime`), so the target of the
time between two tokens is a number of sequences per worker, at which the workers' places are full.
Arrivals being random, as many are used as leave room for the spread of the number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cluster.planner_demand import Demand
    from cluster.planner_input import DecodeSteps, WorkerSeen
    from kvferry.ids import WorkerId

_UTILIZATION_MAX = 0.95
"""Beyond this a queue takes for ever to get shorter."""
_WAIT_SHARE_MIN = 0.1
"""Of the target that is left for waiting, at least: prompts that take longer by themselves than the
target will miss it whatever is done, and the others shall not."""
_DRAIN_S = 5.0
_BISECTIONS = 20
_NO_LOAD, _ENDLESS = 0.0, math.inf


@dataclass(frozen=True, slots=True)
class Targets:
    """What is to be kept."""

    ttft_s: float
    itl_s: float
    attainment: float
    """Of the requests, below 1."""


class StepTime:
    """Seconds of a decode step by its sequences: a line through what steps took, least squares."""

    _MEMORY_S = 60.0
    """Time constant."""
    _SLOPE_PRIOR = 1e-3
    """Steps that all had the same number of sequences say nothing of the slope."""

    def __init__(self) -> None:
        self._weight = self._n = self._nn = self._s = self._ns = 0.0

    def learn(self, seen: list[DecodeSteps], interval_s: float) -> None:
        """One interval of all workers."""
        kept = math.exp(-interval_s / self._MEMORY_S)
        self._weight, self._n, self._s = kept * self._weight, kept * self._n, kept * self._s
        self._nn, self._ns = kept * self._nn, kept * self._ns
        for each in seen:
            if each.steps:
                weight, n, s = each.steps, each.tokens / each.steps, each.seconds / each.steps
                self._weight += weight
                self._n += weight * n
                self._nn += weight * n * n
                self._s += weight * s
                self._ns += weight * n * s

    @property
    def line(self) -> tuple[float, float] | None:
        """(a, b), both at least 0; None before the first step."""
        if self._weight < 1e-9:
            return None
        n, s = self._n / self._weight, self._s / self._weight
        spread = self._nn / self._weight - n * n
        slope = (self._ns / self._weight - n * s) / (spread + self._SLOPE_PRIOR * n * n)
        slope = min(max(slope, 0.0), s / n)
        return s - slope * n, slope


class PromptRate:
    """Prompt tokens that a worker computes per second with nothing beside it.

    Who still has answers from before its role changed computes prompts slowly for a while, and goes
    on to be taken for slow until it has computed many more. So each counts with its best of late.
    """

    _MEMORY_S = 120.0
    """Time constant."""

    def __init__(self) -> None:
        self._best: dict[WorkerId, float] = {}

    def learn(self, workers: Iterable[WorkerSeen], interval_s: float) -> None:
        """One interval of all workers; who is not among them is forgotten."""
        kept = math.exp(-interval_s / self._MEMORY_S)
        before, self._best = self._best, {}
        for each in workers:
            best = kept * before.get(each.worker_id, 0.0)
            self._best[each.worker_id] = max(best, each.prefill_tokens_per_s)

    @property
    def tokens_per_s(self) -> float:
        """The mean of those that were measured; 0 before."""
        measured = [rate for rate in self._best.values() if rate > 0.0]
        return sum(measured) / len(measured) if measured else 0.0


@dataclass(frozen=True, slots=True)
class PromptCapacity:
    """How fast one worker computes prompts."""

    tokens_per_s: float

    def load(self, demand: Demand, workers: int, targets: Targets) -> float:
        """Of so many workers; endless for none."""
        if demand.prompt_tokens == 0.0:
            return _NO_LOAD
        if not workers:
            return _ENDLESS
        most = self._utilization(demand, workers, targets) * workers * self.tokens_per_s
        horizon_s = max(_DRAIN_S, targets.ttft_s)
        usual = demand.prompt_tokens_per_s * targets.ttft_s / 2.0
        excess = max(0.0, demand.backlog_tokens - usual)
        return (demand.prompt_tokens_per_s + excess / horizon_s) / most

    def _utilization(self, demand: Demand, workers: int, targets: Targets) -> float:
        """The most at which the target is kept."""
        prompt_s = demand.prompt_tokens / self.tokens_per_s
        own_s = prompt_s * (1.0 + math.sqrt(demand.prompt_variation))
        wait_s = max(targets.ttft_s - own_s, _WAIT_SHARE_MIN * targets.ttft_s)
        power = math.sqrt(2.0 * (workers + 1.0)) - 1.0
        scale = 2.0 * workers * wait_s / (prompt_s * (1.0 + demand.prompt_variation))
        low, high = 0.0, _UTILIZATION_MAX
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2.0
            late = middle**power * math.exp(-scale * (1.0 - middle))
            low, high = (middle, high) if late <= 1.0 - targets.attainment else (low, middle)
        return high


@dataclass(frozen=True, slots=True)
class DecodeCapacity:
    """How many sequences one worker decodes within the target, and how long a step is then."""

    sequences: float
    step_s: float

    @staticmethod
    def of(line: tuple[float, float], places: float, targets: Targets) -> DecodeCapacity:
        """By steps of this line, in so many places; one sequence at least."""
        base_s, sequence_s = line
        most = max(1.0, places)
        if sequence_s > 0.0:
            most = min(most, max(1.0, (targets.itl_s - base_s) / sequence_s))
        return DecodeCapacity(most, base_s + sequence_s * most)

    def load(self, demand: Demand, workers: int, targets: Targets) -> float:
        """Of so many workers; endless for none."""
        wanted = max(demand.answer_tokens_per_s * self.step_s, demand.sequences)
        if wanted == 0.0:
            return _NO_LOAD
        if not workers:
            return _ENDLESS
        places = workers * self.sequences
        spread = NormalDist().inv_cdf(targets.attainment)
        # m + spread sqrt(m) = places
        most = ((math.sqrt(spread**2 + 4.0 * places) - spread) / 2.0) ** 2
        return wanted / most
