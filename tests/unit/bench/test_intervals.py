"""Intervals hold what they say on series whose neighbours are alike."""

from __future__ import annotations

import numpy as np
import pytest

from bench import intervals
from bench.intervals import block_length, draw, interval, ratio


def autoregressive(rng: np.random.Generator, count: int, memory: float) -> np.ndarray:
    """x[i] = memory * x[i - 1] + noise, at rest from the start."""
    noise = rng.normal(size=count + 200)
    out = np.empty_like(noise)
    last = 0.0
    for place, each in enumerate(noise):
        last = memory * last + each
        out[place] = last
    return out[200:]


def coverage(memory: float, block: int | None, runs: int = 40) -> float:
    """In which part of the runs the interval of the ratio of two means holds the true one, 1."""
    rng, held = np.random.default_rng(7), 0
    for seed in range(runs):
        samples, blocks = [], []
        for which in range(2):
            series = 20.0 + autoregressive(rng, 400, memory)
            draws = draw(400, block or block_length(series), 400, 2 * seed + which)
            samples.append(draws.means(series))
            blocks.append(draws.blocks)
        low, high = interval(ratio(samples[1], samples[0]), min(blocks), 0.9) or (2.0, 2.0)
        held += low <= 1.0 <= high
    return held / runs


def test_blocks_cover_where_single_requests_do_not() -> None:
    # Of 40 runs at 0.9, 33 or more are expected in 97 of 100 cases.
    assert coverage(0.7, None) >= 0.8
    assert coverage(0.7, 1) <= 0.7


@pytest.mark.parametrize(("memory", "least", "most"), [(0.0, 1, 12), (0.5, 4, 25), (0.9, 20, 120)])
def test_a_longer_memory_asks_for_longer_blocks(memory: float, least: int, most: int) -> None:
    series = autoregressive(np.random.default_rng(3), 3000, memory)
    assert least <= block_length(series) <= most


def test_a_block_of_what_never_changes_is_one_request() -> None:
    assert block_length(np.ones(500)) == 1
    assert block_length(np.full(500, np.nan)) == 1


@pytest.mark.parametrize("block", [1, 3, 40])
def test_every_sample_is_as_large_and_every_request_as_likely(block: int) -> None:
    draws = draw(120, block, 3000, seed=1)
    sizes = draws.weights.sum(axis=1)
    assert (sizes == sizes[0]).all()
    assert draws.weights.mean(axis=0) == pytest.approx(np.ones(120), abs=0.2)
    assert draws.blocks == 120 / block


def test_quantiles_of_a_sample_are_those_of_its_requests() -> None:
    values = np.random.default_rng(5).exponential(size=200)
    values[::7] = np.nan
    draws = draw(200, 5, 20, seed=2)
    found = draws.quantiles(values, (0.5, 0.9))
    for row, weights in enumerate(draws.weights):
        sample = np.repeat(values, weights.astype(int))
        sample = sample[~np.isnan(sample)]
        expected = np.quantile(sample, (0.5, 0.9), method="inverted_cdf")
        assert found[:, row] == pytest.approx(expected)
        assert draws.means(values)[row] == pytest.approx(sample.mean())


def test_many_requests_are_gathered_and_quantiles_stay_right() -> None:
    values = np.random.default_rng(5).exponential(size=50_000)
    draws = draw(values.size, 10, 50, seed=2)
    assert draws.weights.shape[1] <= intervals.CELLS_MAX
    (p90,) = draws.quantiles(values, (0.9,))
    assert p90.mean() == pytest.approx(np.quantile(values, 0.9), rel=0.01)


def test_no_interval_of_few_blocks_nor_of_nothing() -> None:
    samples = np.random.default_rng(1).normal(size=500)
    assert interval(samples, intervals.BLOCKS_MIN - 1, 0.95) is None
    assert interval(np.full(500, np.nan), 100.0, 0.95) is None


def test_few_blocks_make_an_interval_wider() -> None:
    samples = np.random.default_rng(1).normal(size=5000)
    few, many = interval(samples, 10.0, 0.95), interval(samples, 1e6, 0.95)
    assert few is not None
    assert many is not None
    assert many[0] == pytest.approx(-1.96, abs=0.1)
    # Student's t with 9 degrees of freedom has its 97.5 % at 2.262.
    assert few[0] == pytest.approx(-2.262 * np.sqrt(10 / 9), abs=0.15)
