"""Confidence intervals for figures of a run, whose requests wait on one another.

Requests that arrive together stand in the same queue: their times are alike, and a hundred of them
say less than a hundred of different hours would. Drawing single requests again and again, as the
plain bootstrap does, would take them for independent and call chance a difference. Here blocks of
neighbours are drawn, so that what is within a block stays together.

* Circular block bootstrap: D. N. Politis, J. P. Romano, "A circular block-resampling procedure for
  stationary data" (1992). Blocks have one length and wrap around, so every request is as likely.
* Length of a block: D. N. Politis, H. White, "Automatic block-length selection for the dependent
  bootstrap", Econometric Reviews 23 (2004), as corrected by A. Patton, D. N. Politis, H. White,
  Econometric Reviews 28 (2009): the length with the least mean squared error of the variance.
* Interval: percentiles, taken further out for few blocks as in T. Hesterberg, "What teachers should
  know about the bootstrap", The American Statistician 69 (2015), section 5.3.

A drawn sample is a row of weights. Requests are gathered in at most `CELLS_MAX` cells of neighbours
and values in `BINS_MAX` bins of equal counts, so all samples at once are one product of matrices,
whether a run has a hundred requests or a million.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from bench.record import Floats

CELLS_MAX = 1024
BINS_MAX = 2048
"""A quantile of a drawn sample is right to 1/2048 of the requests, exact up to 2,048 of them."""
BLOCKS_MIN = 8
"""With fewer blocks than these an interval would be a guess."""
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """Samples drawn from a series of requests, as weights of its cells."""

    cell_of: NDArray[np.int64]
    """[requests]"""
    weights: NDArray[np.float32]
    """[resamples, cells]: how often each cell is in each sample."""
    blocks: float
    """How many blocks the series has: how many observations it is worth, at most."""

    def sums(self, values: Floats) -> Floats:
        """[resamples]: sum of `values` [requests] in each sample; NaN counts as nothing."""
        cells = self.weights.shape[1]
        per_cell = np.bincount(self.cell_of, np.nan_to_num(values, nan=0.0), cells)
        found: Floats = self.weights.astype(np.float64) @ per_cell
        return found

    def means(self, values: Floats) -> Floats:
        """[resamples]: mean of what is not NaN in each sample; NaN where nothing is."""
        known = (~np.isnan(values)).astype(np.float64)
        return ratio(self.sums(values), self.sums(known))

    def quantiles(self, values: Floats, shares: Sequence[float]) -> Floats:
        """[shares, resamples]: of what is not NaN; the smallest value that the share reaches."""
        known = np.flatnonzero(~np.isnan(values))
        samples, cells = self.weights.shape
        if not known.size:
            return np.full((len(shares), samples), np.nan)
        order = np.argsort(values[known], kind="stable")
        bins = min(BINS_MAX, known.size)
        bin_of = np.arange(known.size) * bins // known.size
        means = np.bincount(bin_of, values[known][order]) / np.bincount(bin_of)
        flat = self.cell_of[known][order] * bins + bin_of
        counts = np.bincount(flat, minlength=cells * bins).reshape(cells, bins)
        below = np.cumsum(self.weights @ counts.astype(np.float32), axis=1, dtype=np.float64)
        total = below[:, -1:]
        found = [np.argmax(below >= share * total - 1e-9, axis=1) for share in shares]
        picked = np.stack([means[place] for place in found])
        return np.where(total[:, 0] > 0, picked, np.nan)


def draw(requests: int, block: int, resamples: int, seed: int) -> Draws:
    """Samples of a series of `requests` in blocks of about `block` neighbours."""
    assert requests > 0
    assert block > 0
    cell = -(-requests // CELLS_MAX)
    cells = -(-requests // cell)
    length = min(cells, max(1, round(block / cell)))
    starts = np.random.default_rng(seed).integers(
        0, cells, (resamples, max(1, round(cells / length)))
    )
    rows = np.arange(resamples)[:, None] * cells
    begun = np.bincount((rows + starts).ravel(), minlength=resamples * cells)
    begun = begun.reshape(resamples, cells)
    # A cell is in every block that began at it or up to `length` - 1 cells before it.
    wrapped = np.concatenate([begun[:, cells - length :], begun], axis=1)
    ended = np.cumsum(wrapped, axis=1)
    weights = (ended[:, length:] - ended[:, :-length]).astype(np.float32)
    return Draws(np.arange(requests) // cell, weights, cells / length)


def ratio(above: Floats, below: Floats) -> Floats:
    """`above` / `below`, NaN where `below` is 0."""
    nothing = np.full(above.shape, np.nan)
    found: Floats = np.divide(above, below, out=nothing, where=below != 0)
    return found


def block_length(series: Floats) -> int:
    """How many neighbours belong in one block, 1 to a third of the series [requests].

    Politis and White's rule for the circular bootstrap: b = (2 G^2 / D)^(1/3) n^(1/3), with
    D = 4/3 g(0)^2, g(0) the sum of autocovariances and G that of |k| times the autocovariance, both
    through a flat-top window that ends at twice the lag beyond which no correlation is seen.
    """
    known = series[~np.isnan(series)]
    count = known.size
    if count < 2 * BLOCKS_MIN or not np.ptp(known):
        return 1
    covariances = _autocovariances(known)
    ends = _last_lag(covariances / covariances[0], count)
    lags = np.arange(1, min(2 * ends, covariances.size - 1) + 1)
    window = np.minimum(1.0, 2.0 * (1.0 - lags / (2 * ends)))
    seen = window * covariances[lags]
    spectrum = covariances[0] + 2.0 * seen.sum()
    if spectrum <= 0:
        return 1
    slope = 2.0 * (lags * seen).sum()
    best = (2.0 * slope**2 / (4.0 / 3.0 * spectrum**2)) ** (1 / 3) * count ** (1 / 3)
    longest = math.ceil(min(3.0 * math.sqrt(count), count / 3.0))
    return int(min(max(1, math.ceil(best)), longest))


def _autocovariances(series: Floats) -> Floats:
    """[lags]: up to sqrt(n) + what `_last_lag` looks ahead, by a Fourier transform."""
    centred = series - series.mean()
    size = 1 << (2 * centred.size - 1).bit_length()
    power = np.abs(np.fft.rfft(centred, size)) ** 2
    most = min(centred.size - 1, 2 * math.ceil(math.sqrt(centred.size)) + _ahead(centred.size))
    found: Floats = np.fft.irfft(power, size)[: most + 1] / centred.size
    return found


def _ahead(count: int) -> int:
    return max(5, math.ceil(math.sqrt(math.log10(count))))


def _last_lag(correlations: Floats, count: int) -> int:
    """The lag after which `_ahead` correlations in a row are no more than chance; at least 1."""
    ahead, most = _ahead(count), math.ceil(math.sqrt(count))
    small = np.abs(correlations[1:]) < 2.0 * math.sqrt(math.log10(count) / count)
    for lag in range(min(most, small.size)):
        if small[lag : lag + ahead].all():
            return max(1, lag)
    return most


def interval(samples: Floats, blocks: float, level: float) -> tuple[float, float] | None:
    """What holds the true value with probability `level`; None where too little is known.

    `samples` [resamples] of the figure, of a series worth `blocks` observations.
    """
    known = samples[np.isfinite(samples)]
    if blocks < BLOCKS_MIN or known.size < 0.99 * samples.size:
        return None
    stretched = math.sqrt(blocks / (blocks - 1.0)) * _student((1.0 + level) / 2.0, blocks - 1.0)
    tail = _NORMAL.cdf(-stretched)
    low, high = np.quantile(known, (tail, 1.0 - tail)).tolist()
    return low, high


def _student(share: float, freedom: float) -> float:
    """Quantile of Student's t; Abramowitz and Stegun, 26.7.5: error below 0.3 % from 7 degrees."""
    z = _NORMAL.inv_cdf(share)
    terms = (
        (z**3 + z) / 4.0,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96.0,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384.0,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160.0,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))
