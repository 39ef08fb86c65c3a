"""Straight lines with terms of at least 0, fitted to what was measured on a noisy machine.

Times are never negative, so neither are their terms: least squares under that condition (C. Lawson,
R. Hanson, Solving Least Squares Problems, 1974, chapter 23). With the few terms here all sets of
terms that are above 0 are tried, and the best admissible one is the answer.

What a busy machine delays now and then must not bend the line: errors above a bound count by their
size and not by its square (P. Huber, Robust Estimation of a Location Parameter, 1964), by weighing
each measurement anew with its last error (P. Holland, R. Welsch, Robust Regression Using
Iteratively Reweighted Least-Squares, 1977). Errors are shares of what was measured: a tenth of a
short step counts as much as a tenth of a long one.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvferry.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

_ROUNDS = 50
_HUBER = 1.345
"""In standard deviations: 95 % of the efficiency of least squares where errors are normal."""
_TO_DEVIATION = 1.4826
"""From the median of normal errors' sizes to their standard deviation."""
_TERMS_MAX = 8
_ERROR_LEAST = 1e-4
"""Errors below are no reason to weigh one measurement less than another."""


@dataclass(frozen=True, slots=True)
class Line:
    """A fitted sum of terms."""

    terms: Mapping[str, float]
    median_error: float
    """Of the sizes of the errors, as shares of what was measured."""
    worst_error: float
    samples: int

    def about(self) -> dict[str, float | int]:
        """What a file says of the fit."""
        return {
            "median_error": round(self.median_error, 4),
            "worst_error": round(self.worst_error, 4),
            "samples": self.samples,
        }


def fit_line(
    what: str,
    names: Sequence[str],
    rows: Sequence[Sequence[float]],
    seconds: Sequence[float],
    error_max: float,
) -> Line:
    """The terms of `names`, of which `rows` has the multiples, one row for each of `seconds`.

    Raises `InvalidInput` naming `what`, if there are fewer measurements than terms, if one took no
    time, and if half of them are further than `error_max` from the line.
    """
    assert 1 <= len(names) <= _TERMS_MAX, "every set of terms is tried"
    measured = np.asarray(seconds, dtype=np.float64)
    if measured.size < len(names):
        raise InvalidInput(what, f"{measured.size} measurements cannot tell {len(names)} terms")
    if not (np.isfinite(measured) & (measured > 0.0)).all():
        raise InvalidInput(what, "a measurement took no time")
    shares = np.asarray(rows, dtype=np.float64).reshape(-1, len(names)) / measured[:, None]
    terms = _robust(shares)
    errors = np.abs(shares @ terms - 1.0)
    line = Line(
        dict(zip(names, terms.tolist(), strict=True)),
        float(np.median(errors)),
        float(errors.max()),
        measured.size,
    )
    if line.median_error > error_max:
        told = f"half of the measurements are {line.median_error:.1%} and more from the fitted line"
        raise InvalidInput(what, f"{told}, allowed are {error_max:.1%}: is the machine busy?")
    return line


def _robust(shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Terms for which `shares @ terms` are near 1; float64 [terms]."""
    weights = np.ones(shares.shape[0])
    terms = nonnegative_least_squares(shares, weights)
    for _ in range(_ROUNDS):
        errors = np.abs(shares @ terms - 1.0)
        bound = max(_HUBER * _TO_DEVIATION * float(np.median(errors)), _ERROR_LEAST)
        weights = np.sqrt(bound / np.maximum(errors, bound))
        before, terms = terms, nonnegative_least_squares(shares * weights[:, None], weights)
        if np.allclose(terms, before, rtol=1e-6, atol=0.0):
            break
    return terms


def nonnegative_least_squares(
    rows: NDArray[np.float64], wanted: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The terms of at least 0 with the smallest sum of squares of `rows @ terms - wanted`.

    float64 [measurements, terms] and [measurements] to [terms].
    """
    count = rows.shape[1]
    # Columns differ by ten powers of ten: seconds per step, per token and context.
    scale = np.maximum(np.linalg.norm(rows, axis=0), np.finfo(np.float64).tiny)
    scaled = rows / scale
    best, best_error = np.zeros(count), float(wanted @ wanted)
    for size in range(1, count + 1):
        for chosen in itertools.combinations(range(count), size):
            columns = list(chosen)
            found = np.linalg.lstsq(scaled[:, columns], wanted, rcond=None)[0]
            if (found < 0.0).any():
                continue
            terms = np.zeros(count)
            terms[columns] = found
            error = float(((scaled @ terms - wanted) ** 2).sum())
            # A term more has to be worth it: not by rounding alone.
            if error < best_error * (1.0 - 1e-12):
                best, best_error = terms, error
    unscaled: NDArray[np.float64] = best / scale
    return unscaled
