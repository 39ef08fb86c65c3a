"""Loads that swing between prompt-heavy and output-heavy, for `benchmarks.planner`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator


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
