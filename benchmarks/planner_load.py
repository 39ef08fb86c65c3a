"""Loads that swing between prompt-heavy and output-heavy, for `benchmarks.planner`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from bench.traces import read_trace
from cluster.planner_capacity import DecodeCapacity, PromptCapacity
from cluster.planner_demand import Demand

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from benchmarks.planner_sim import Timing
    from cluster.planner_capacity import Targets


@dataclass(frozen=True, slots=True)
class Mix:
    """One kind of request: mean lengths in tokens."""

    prompt: float
    answer: float


@dataclass(slots=True, eq=False)
class Asked:
    """One request, and what became of it; seconds of the simulated clock."""

    at: float
    prompt: int
    answer: int
    first_at: float | None = None
    ended_at: float | None = None

    @property
    def ttft_s(self) -> float:
        """Endless: it never came."""
        return math.inf if self.first_at is None else self.first_at - self.at

    @property
    def itl_s(self) -> float:
        """The mean; 0 for an answer of one token, endless for one without an end."""
        if self.ended_at is None or self.first_at is None:
            return math.inf
        return (self.ended_at - self.first_at) / max(1, self.answer - 1)


PROMPTS, ANSWERS = Mix(4000.0, 60.0), Mix(300.0, 800.0)
"""The two ends: documents that are asked about, and short questions with long answers."""
_SPREAD = 0.5
"""Of the logarithm of lengths."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How the load goes through time: the share of the prompt-heavy end, from 0 to 1."""

    name: str
    share_at: Callable[[float], float]


def shape_of(name: str, rng: random.Random, seconds: float) -> Shape:
    """By its name, such as square-120. Raises `ValueError` for no name of a shape."""
    kind, _, number = name.partition("-")
    match kind:
        case "square":
            return square(float(number))
        case "sine":
            return sine(float(number))
        case "steady":
            return steady(float(number))
        case "erratic":
            return erratic(float(number), rng, seconds)
    raise ValueError(f"{name} is no shape: square, sine, erratic or steady, and a number")


def square(period_s: float) -> Shape:
    """Half a period of one end, half a period of the other."""
    return Shape(f"square-{period_s:g}", lambda now: float(now % period_s < period_s / 2.0))


def sine(period_s: float) -> Shape:
    """From one end to the other and back, evenly."""
    return Shape(
        f"sine-{period_s:g}", lambda now: 0.5 + 0.5 * math.sin(2.0 * math.pi * now / period_s)
    )


def steady(share: float) -> Shape:
    """The same all the time."""
    return Shape(f"steady-{share:g}", lambda now: share)


def erratic(mean_s: float, rng: random.Random, seconds: float) -> Shape:
    """One end for a random while, then the other; exponential, not below a tenth of the mean."""
    turns, now = [0.0], 0.0
    while now < seconds:
        now += max(mean_s / 10.0, rng.expovariate(1.0 / mean_s))
        turns.append(now)

    def share_at(at: float) -> float:
        return float(sum(turn <= at for turn in turns) % 2)

    return Shape(f"erratic-{mean_s:g}", share_at)


def arrivals(
    shape: Shape, rates: tuple[float, float], seconds: float, rng: random.Random
) -> Iterator[Asked]:
    """Random arrivals: of prompt-heavy requests at the first of `rates` times the share of the
    shape, of the others at the second times the rest."""
    bound, now = sum(rates), 0.0
    while (now := now + rng.expovariate(bound)) < seconds:
        share = shape.share_at(now)
        point = rng.random() * bound
        if point < rates[0] * share:
            yield _drawn(now, PROMPTS, rng)
        elif rates[0] <= point < rates[0] + rates[1] * (1.0 - share):
            yield _drawn(now, ANSWERS, rng)


def _drawn(now: float, mix: Mix, rng: random.Random) -> Asked:
    return Asked(now, _length(mix.prompt, rng), _length(mix.answer, rng))


def _length(mean: float, rng: random.Random) -> int:
    return max(2, round(mean * rng.lognormvariate(-_SPREAD * _SPREAD / 2.0, _SPREAD)))


def rates_of(workers: int, timing: Timing, targets: Targets) -> tuple[float, float]:
    """Of either end, see `rate_of`."""
    return rate_of(PROMPTS, workers, timing, targets), rate_of(ANSWERS, workers, timing, targets)


def rate_of(mix: Mix, workers: int, timing: Timing, targets: Targets) -> float:
    """Requests per second for which the best split of the workers just holds the targets."""
    variation = math.exp(_SPREAD * _SPREAD) - 1.0
    low, high = 0.0, 1e4
    for _ in range(50):
        middle = (low + high) / 2.0
        demand = Demand(
            middle * mix.prompt, mix.prompt, variation, middle * mix.answer, mix.answer, 0.0, 0.0
        )
        fits = _least_load(demand, workers, timing, targets) <= 1.0
        low, high = (middle, high) if fits else (low, middle)
    return low


def _least_load(demand: Demand, workers: int, timing: Timing, targets: Targets) -> float:
    """Of the busier role, in the best split."""
    context = demand.prompt_tokens + demand.answer_tokens / 2.0
    line = (timing.step_s, timing.sequence_s + timing.context_token_s * context)
    prompts = PromptCapacity(1.0 / timing.prompt_token_s)
    answers = DecodeCapacity.of(line, timing.running_max, targets)
    return min(
        max(prompts.load(demand, each, targets), answers.load(demand, workers - each, targets))
        for each in range(1, workers)
    )


def recorded(
    traces: Sequence[Path], load: float, seconds: float, capacity: Callable[[Mix], float]
) -> list[Asked]:
    """Requests of traces with recorded times, each trace for an equal part of `seconds`. Of each as
    many as make `load` times `capacity`, requests per second of its mean lengths; their times are
    scaled to the part and keep their proportions."""
    part_s = seconds / len(traces)
    asked: list[Asked] = []
    for number, path in enumerate(traces):
        requests = read_trace(path).requests
        mix = Mix(
            fmean(each.prompt_tokens for each in requests),
            fmean(each.answer_tokens for each in requests),
        )
        some = requests[: max(2, round(load * capacity(mix) * part_s))]
        first, last = some[0].at_s or 0.0, some[-1].at_s or 0.0
        for each in some:
            at = number * part_s + part_s * ((each.at_s or 0.0) - first) / max(last - first, 1e-9)
            asked.append(Asked(at, max(1, each.prompt_tokens), max(2, each.answer_tokens)))
    return sorted(asked, key=lambda each: each.at)
