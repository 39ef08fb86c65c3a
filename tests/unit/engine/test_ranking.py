"""The most likely tokens, against a sort of everything."""

from __future__ import annotations

import numpy as np
import pytest

from engine.ranking import most_likely


def _reference(row: np.ndarray, count: int) -> list[tuple[float, int]]:
    pairs = [(-float(score), at) for at, score in enumerate(row) if score > -np.inf]
    return [(-score, at) for score, at in sorted(pairs)[:count]]


def _scores(vocab_size: int, levels: int) -> np.ndarray:
    rng = np.random.default_rng(vocab_size + levels)
    return (rng.integers(0, levels, (4, vocab_size)) / 10).astype(np.float32)


@pytest.mark.parametrize("count", [1, 2, 40, 512, 3000])
@pytest.mark.parametrize("vocab_size", [1, 63, 64, 1000, 3001])
@pytest.mark.parametrize("levels", [1, 3, 10**6])
def test_as_if_everything_were_sorted(vocab_size: int, levels: int, count: int) -> None:
    scores = _scores(vocab_size, levels)
    scores[1, ::3] = -np.inf
    scores[2, 1:] = -np.inf
    best, ids = most_likely(scores, count)
    assert best.shape == ids.shape
    for row, (own_best, own_ids) in enumerate(zip(best, ids, strict=True)):
        found = list(zip(own_best.tolist(), own_ids.tolist(), strict=True))
        expected = _reference(scores[row], count)
        assert found[: len(expected)] == expected
        assert found[len(expected) :] == [(-np.inf, 0)] * (len(found) - len(expected))


def test_a_row_without_any_number_has_no_best() -> None:
    scores = np.full((2, 500), np.nan, dtype=np.float32)
    scores[1] = -np.inf
    best, _ = most_likely(scores, 5)
    assert best.shape == (2, 0)
