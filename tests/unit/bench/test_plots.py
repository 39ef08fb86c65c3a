"""Where points and ticks lie."""

from __future__ import annotations

import numpy as np
import pytest

from bench.plots import Axis, Mark, Plot, Series, Table, distribution, frame, nice_step, thinned
from bench.report_text import count, seconds, share, size


def plot(x, y, *, mark=Mark.LINE, logarithmic=False) -> Plot:
    series = Series("a", 0, np.array(x, dtype=float), np.array(y, dtype=float), mark)
    axes = (Axis("x", str, logarithmic), Axis("y", str, logarithmic))
    return Plot("p", "P", "told", *axes, (series,), Table((), ()))


def test_a_line_from_corner_to_corner() -> None:
    drawn = frame(plot([0, 10], [0, 5]))
    assert [path.d for path in drawn.paths] == ["M0 1000L1000 0"]
    assert [tick.text for tick in drawn.x_ticks] == ["0.0", "2.0", "4.0", "6.0", "8.0", "10.0"]
    assert [tick.at for tick in drawn.y_ticks] == [100, 80, 60, 40, 20, 0]


def test_what_is_not_known_breaks_a_line() -> None:
    drawn = frame(plot([0, 1, 2, 3, 4], [1, 1, np.nan, 1, 1]))
    assert drawn.paths[0].d.count("M") == 2
    assert frame(plot([1, 2], [np.nan, np.nan])).empty
    assert frame(plot([], [])).empty


def test_a_logarithmic_axis_leaves_out_what_it_cannot_show() -> None:
    drawn = frame(plot([0, 1, 10, 100], [1, 1, 10, 100], mark=Mark.DOTS, logarithmic=True))
    assert drawn.paths[0].d.count("h0") == 3
    assert [tick.text for tick in drawn.x_ticks] == ["1.0", "3.0", "10.0", "30.0", "100.0"]
    gaps = np.diff([tick.at for tick in drawn.x_ticks])
    assert gaps[0] + gaps[1] == pytest.approx(gaps[2] + gaps[3], abs=0.02)


def test_one_value_has_a_place() -> None:
    for logarithmic in (False, True):
        drawn = frame(plot([3], [3], mark=Mark.DOTS, logarithmic=logarithmic))
        assert len(drawn.paths) == 1
        assert drawn.x_ticks


@pytest.mark.parametrize(("least", "step"), [(0.9, 1), (1, 1), (1.1, 2), (2.2, 2.5), (30, 50)])
def test_steps_are_round(least: float, step: float) -> None:
    assert nice_step(least) == pytest.approx(step)


def test_a_distribution_keeps_its_ends_and_its_tail() -> None:
    values = np.arange(100_000.0)
    xs, shares = distribution(np.random.default_rng(1).permutation(values))
    assert xs.size <= 400
    assert xs[-1] == 99_999
    assert shares[-1] == 1.0
    assert (np.diff(shares) >= 0).all()
    assert np.interp(0.99, shares, xs) == pytest.approx(99_000, rel=1e-3)
    few, shares = distribution(np.array([3.0, np.nan, 1.0]))
    assert few.tolist() == [1.0, 3.0]
    assert shares.tolist() == [0.5, 1.0]


def test_dots_are_evenly_left_out() -> None:
    assert thinned(10, 20).tolist() == list(range(10))
    assert thinned(10, 4).tolist() == [0, 3, 6, 9]
    assert thinned(0).size == 0


def test_numbers_are_short() -> None:
    texts = [seconds(0.0123), seconds(1.25), seconds(340.4), seconds(0.00001), seconds(None)]
    assert [text.replace("\u00a0", " ") for text in texts] == [
        "12.3 ms",
        "1.25 s",
        "340 s",
        "10 µs",
        "–",  # noqa: RUF001 - an en dash is nothing in tables
    ]
    assert count(12_345).replace("\u00a0", " ") == "12.3 k"
    assert count(100) == "100"
    assert size(1536).replace("\u00a0", " ") == "1.5 KiB"
    assert share(0.125).replace("\u00a0", " ") == "12.5 %"
