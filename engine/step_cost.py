"""How long steps take on this worker, learned from those it has computed.

    seconds = decode part (1, tokens, context) + prompt part (1, tokens, tokens x context)

Each part is a least-squares fit with coefficients >= 0 over recent steps, older ones forgotten bit
by bit. Steps without prompts teach the first, steps with prompts, by what they took beyond it, the
second: so neither is forgotten while only the other is seen. A pure function of what was observed,
in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MEMORY = 0.95
"""Weight of a step after the next one of its kind: some 20 are remembered."""
_RIDGE = 1e-4
"""Keeps what the steps do not tell apart small, relative to one step's weight."""
_OUTLIER = 3.0
"""A step that took so many times what was expected counts as one of that length: a pause of the
machine says little of the next step. Where steps really have become longer, a few say so."""
_SURE_AFTER = 8
"""Steps of a kind, before which none is an outlier."""
_GROWTH = 2
"""Prompt tokens are not extrapolated beyond so many times the most that were seen."""
_DEVIATION_MEMORY = 0.9
_DEVIATIONS = 2.0
"""Mean deviations that are added to an expectation: enough for nineteen steps in twenty."""

_TOKENS = 128.0
_CONTEXT = 1024.0
"""Units, so that all coefficients are of about one size."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step computes."""

    decode_tokens: int
    """Of answers, those of drafts included."""
    decode_context: int
    """Tokens that these read, over all sequences."""
    prompt_tokens: int = 0
    prompt_pairs: int = 0
    """Over the prompt tokens, how many tokens precede each."""

    def with_prompt(self, tokens: int, start: int) -> StepShape:
        """And `tokens` of a prompt, behind the first `start` of it."""
        pairs = tokens * start + tokens * (tokens - 1) // 2
        return StepShape(
            self.decode_tokens,
            self.decode_context,
            self.prompt_tokens + tokens,
            self.prompt_pairs + pairs,
        )


class StepCost:
    """Expected seconds of steps, and how far they were off."""

    def __init__(self) -> None:
        self._decode = _Fit()
        self._prompt = _Fit()
        self._deviation = 0.0
        """Running mean of |seconds / expected - 1|."""
        self._most_tokens = 0

    @property
    def knows_decoding(self) -> bool:
        """Whether any step without prompts was seen."""
        return self._decode.count > 0

    def observe(self, shape: StepShape, seconds: float) -> None:
        """A step took so long."""
        expected = self._expected(shape)
        if expected > 0.0:
            off = min(abs(seconds / expected - 1.0), 1.0)
            self._deviation = _DEVIATION_MEMORY * self._deviation + (1.0 - _DEVIATION_MEMORY) * off
        if shape.prompt_tokens == 0:
            self._decode.add(_decode_features(shape), seconds, 0.0)
        elif self.knows_decoding:
            base = self._decode.value(_decode_features(shape))
            self._prompt.add(_prompt_features(shape), seconds, base)
            self._most_tokens = max(self._most_tokens, shape.prompt_tokens)

    def bound(self, shape: StepShape) -> float:
        """Seconds that a step hardly exceeds."""
        return self._expected(shape) * (1.0 + _DEVIATIONS * self._deviation)

    def prompt_tokens(self, decoding: StepShape, start: int, limit_s: float, most: int) -> int:
        """How many tokens of a prompt, behind its first `start`, a step of `decoding` may compute
        besides within `limit_s`: from 0 to `most`. 0 as well while prompts are unknown."""
        low, high = 0, min(most, _GROWTH * self._most_tokens)
        while low < high:
            middle = (low + high + 1) // 2
            if self.bound(decoding.with_prompt(middle, start)) <= limit_s:
                low = middle
            else:
                high = middle - 1
        return low

    def _expected(self, shape: StepShape) -> float:
        seconds = self._decode.value(_decode_features(shape))
        if shape.prompt_tokens:
            seconds += self._prompt.value(_prompt_features(shape))
        return seconds


class _Fit:
    """A line through the origin of three features, all coefficients >= 0."""

    def __init__(self) -> None:
        self.count = 0
        self._squares = np.zeros((3, 3))
        self._products = np.zeros(3)
        self._coefficients = np.zeros(3)

    def value(self, features: NDArray[np.float64]) -> float:
        """What is expected of `features` [3]."""
        return float(features @ self._coefficients)

    def add(self, features: NDArray[np.float64], total: float, base: float) -> None:
        """`total`, of which `base` is not of these features, was seen."""
        if self.count >= _SURE_AFTER:
            total = min(total, _OUTLIER * (base + self.value(features)))
        self.count += 1
        self._squares = _MEMORY * self._squares + np.outer(features, features)
        self._products = _MEMORY * self._products + features * max(total - base, 0.0)
        self._coefficients = _solve(self._squares, self._products)


def _solve(squares: NDArray[np.float64], products: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares without negative coefficients, [3]: what would be negative is left out."""
    kept = np.arange(3)
    found = np.zeros(3)
    while len(kept):
        ridge = _RIDGE * np.eye(len(kept))
        some = np.linalg.solve(squares[np.ix_(kept, kept)] + ridge, products[kept])
        if (some >= 0.0).all():
            found[kept] = some
            break
        kept = kept[some > 0.0]
    return found


def _decode_features(shape: StepShape) -> NDArray[np.float64]:
    return np.array([1.0, shape.decode_tokens / 8.0, shape.decode_context / (8.0 * _CONTEXT)])


def _prompt_features(shape: StepShape) -> NDArray[np.float64]:
    return np.array([1.0, shape.prompt_tokens / _TOKENS, shape.prompt_pairs / (_TOKENS * _CONTEXT)])
