"""Known terms come back out of noisy measurements."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.errors import InvalidInput
from simulator.fit import fit_line, nonnegative_least_squares

NAMES = ("step", "token", "context")
TRUE = np.array([0.004, 0.002, 3e-7])


def measured(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    tokens = rng.integers(16, 2000, 60).astype(float)
    rows = np.column_stack([np.ceil(tokens / 128), tokens, tokens * tokens / 2])
    return rows, rows @ TRUE


def test_terms_come_back_from_noise_and_interruptions():
    rng = np.random.default_rng(0)
    rows, seconds = measured(rng)
    noisy = seconds * rng.normal(1.0, 0.02, seconds.size)
    noisy[::4] *= 1.6
    line = fit_line("prompts", NAMES, rows, noisy, 0.1)
    assert line.terms["token"] == pytest.approx(0.002, rel=0.05)
    assert line.terms["context"] == pytest.approx(3e-7, rel=0.25)
    # Not by weight alone: squares would be far off.
    plain = nonnegative_least_squares(rows / noisy[:, None], np.ones(60))
    fitted = np.array([line.terms[name] for name in NAMES])
    near, far = (np.abs(rows @ terms / seconds - 1.0).max() for terms in (fitted, plain))
    assert near < 0.06 < far
    assert line.median_error < 0.05
    assert line.worst_error > 0.3
    assert line.samples == 60


def test_exact_measurements_give_exact_terms():
    rows, seconds = measured(np.random.default_rng(1))
    line = fit_line("prompts", NAMES, rows, seconds, 0.01)
    assert list(line.terms.values()) == pytest.approx(TRUE.tolist(), rel=1e-6)


def test_no_term_is_below_0():
    rows = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    # Plain least squares has a slope of -1 here; the best line without is the mean.
    assert nonnegative_least_squares(rows, np.array([3.0, 2.0, 1.0])).tolist() == pytest.approx(
        [2.0, 0.0]
    )


def test_too_few_and_impossible_measurements_are_refused():
    with pytest.raises(InvalidInput, match="answers: 1 measurements cannot tell 2 terms"):
        fit_line("answers", ("step", "token"), [[1.0, 1.0]], [1.0], 0.1)
    with pytest.raises(InvalidInput, match="took no time"):
        fit_line("answers", ("step",), [[1.0], [1.0]], [1.0, 0.0], 0.1)


def test_what_fits_no_line_is_refused():
    with pytest.raises(InvalidInput, match="prompts: half of the measurements"):
        fit_line("prompts", ("step",), [[1.0]] * 4, [1.0, 2.0, 4.0, 8.0], 0.1)
