"""The most likely tokens, against a sort of everything."""

from __future__ import annotations

import numpy as np
import pytest

from engine.crew import Crew
from engine.sampling_step import SamplingStep


def _most_likely(scores: np.ndarray, count: int) -> list[list[tuple[float, int]]]:
    step = SamplingStep(scores)
    for at in range(len(scores)):
        step.tell(step.item(at), count)
    crew = Crew(1)
    step.run(crew.board)
    told = [step.told(item) for item in range(len(scores))]
    return [
        [(logprob + step.norm(item), token) for token, logprob in own]
        for item, own in enumerate(told)
    ]


def _reference(row: np.ndarray, count: int) -> list[tuple[float, int]]:
    pairs = [(-float(score), at) for at, score in enumerate(row) if score > -np.inf]
    return [(-score, at) for score, at in sorted(pairs)[:count]]


def _scores(vocab_size: int, levels: int) -> np.ndarray:
    rng = np.random.default_rng(vocab_size + levels)
    return (rng.integers(-levels, levels, (5, vocab_size)) / 10).astype(np.float32)


@pytest.mark.parametrize("count", [1, 2, 40, 512, 3000])
@pytest.mark.parametrize("vocab_size", [1, 63, 64, 1000, 4096, 3001])
@pytest.mark.parametrize("levels", [1, 3, 10**6])
def test_as_if_everything_were_sorted(vocab_size: int, levels: int, count: int) -> None:
    scores = _scores(vocab_size, levels)
    scores[1, ::3] = -np.inf
    scores[2, 1:] = -np.inf
    scores[3, 1::2] = np.nan
    # Equal to 0, so that the lower id goes first.
    scores[4, ::2] = -0.0
    with np.errstate(all="ignore"):
        found = _most_likely(scores, count)
    for row, own in zip(scores, found, strict=True):
        expected = _reference(row, count)
        assert [token for _, token in own] == [token for _, token in expected]
        assert [score for score, _ in own] == pytest.approx([score for score, _ in expected])


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
def test_a_row_without_a_finite_best_has_no_best(value: float) -> None:
    with np.errstate(all="ignore"):
        assert _most_likely(np.full((1, 500), value, dtype=np.float32), 5) == [[]]
