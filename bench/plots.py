"""Plots as inline SVG: what is drawn, in numbers, and how it is laid out.

A `Plot` has series of points in the units of its axes. `frame` turns it into paths of a square of
`SPAN` units, which the page stretches to the room there is: labels are text of the page beside it,
so they keep their size on a narrow screen, and lines keep their width. A dot is a line without
length and with round ends, hence round at every stretch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from bench.record import Floats

SPAN = 1000
POINTS_MAX = 400
"""Of one line."""
DOTS_MAX = 1500
"""Of one run in one plot; of more requests every n-th is drawn, and the plot says so."""
_TICKS = 5


class Mark(Enum):
    """How a series is drawn."""

    LINE = "line"
    STEPS = "steps"
    DOTS = "dots"
    POINTED = "pointed"
    """A line with a dot at each point."""


class Stroke(Enum):
    """Sets series of one run apart."""

    WHOLE = "whole"
    DASHED = "dashed"
    DOTTED = "dotted"


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """Points [n] of one run; a NaN breaks a line."""

    label: str
    run: int
    """Its place among the runs, which gives its color."""
    x: Floats
    y: Floats
    mark: Mark = Mark.LINE
    stroke: Stroke = Stroke.WHOLE


@dataclass(frozen=True, slots=True)
class Axis:
    """What one direction of a plot means."""

    label: str
    show: Callable[[float], str]
    """A number as text, with its unit."""
    logarithmic: bool = False
    from_zero: bool = True


@dataclass(frozen=True, slots=True)
class Table:
    """Numbers as text; the first column names the row."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Plot:
    """One figure of the report. All texts are plain and escaped by the page."""

    name: str
    """Unique in the page; letters and hyphens."""
    title: str
    told: str
    """What there is to see, for those who see it and those who do not."""
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    table: Table
    legend: tuple[tuple[str, Stroke], ...] = ()
    """What strokes mean, where they differ."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A number on an axis; `at` in percent from the left or from the top."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Path:
    """One `path` of SVG."""

    d: str
    run: int
    label: str
    classes: str


@dataclass(frozen=True, slots=True)
class Frame:
    """A plot, laid out."""

    plot: Plot
    paths: tuple[Path, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]

    @property
    def empty(self) -> bool:
        """Nothing is known of it."""
        return not self.paths


def frame(plot: Plot) -> Frame:
    """Lay out a plot; one without a single point has neither paths nor ticks."""
    usable = [_on_axes(plot, each) for each in plot.series]
    points = [each for each in usable if np.isfinite(each[0]).any()]
    if not points:
        return Frame(plot, (), (), ())
    x = Scale.of(plot.x, np.concatenate([each[0] for each in points]))
    y = Scale.of(plot.y, np.concatenate([each[1] for each in points]))
    paths = [
        path
        for series, (xs, ys) in zip(plot.series, usable, strict=True)
        for path in _paths(series, x.place(xs) * SPAN, (1.0 - y.place(ys)) * SPAN)
    ]
    return Frame(
        plot,
        tuple(paths),
        tuple(Tick(round(100 * at, 2), text) for at, text in x.ticks()),
        tuple(Tick(round(100 * (1.0 - at), 2), text) for at, text in y.ticks()),
    )


def _on_axes(plot: Plot, series: Series) -> tuple[Floats, Floats]:
    """Points where both are known and, on a logarithmic axis, above 0; NaN for the others."""
    known = np.isfinite(series.x) & np.isfinite(series.y)
    if plot.x.logarithmic:
        known &= series.x > 0
    if plot.y.logarithmic:
        known &= series.y > 0
    return np.where(known, series.x, np.nan), np.where(known, series.y, np.nan)


@dataclass(frozen=True, slots=True)
class Scale:
    """From `low` to `high` of an axis, both in its own units and different."""

    axis: Axis
    low: float
    high: float

    @classmethod
    def of(cls, axis: Axis, values: Floats) -> Scale:
        """One that shows all that is not NaN."""
        low, high = float(np.nanmin(values)), float(np.nanmax(values))
        if axis.logarithmic:
            spread = max(high / low, 1.2)
            return cls(axis, low / spread**0.02, low * spread**1.02)
        if axis.from_zero:
            low = min(low, 0.0)
        if high <= low:
            high = low + (abs(low) or 1.0)
        step = nice_step((high - low) / _TICKS)
        return cls(axis, math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step)

    def place(self, values: Floats) -> Floats:
        """0 at `low`, 1 at `high`."""
        if not self.axis.logarithmic:
            return (values - self.low) / (self.high - self.low)
        span = math.log(self.high / self.low)
        found: Floats = np.log(values / self.low) / span
        return found

    def ticks(self) -> list[tuple[float, str]]:
        """Round numbers and where they are, 0 to 1."""
        found = self._decades() if self.axis.logarithmic else self._steps()
        values = np.array(found, dtype=np.float64)
        places = self.place(values).tolist()
        return [(at, self.axis.show(value)) for at, value in zip(places, found, strict=True)]

    def _steps(self) -> list[float]:
        step = nice_step((self.high - self.low) / _TICKS)
        count = round((self.high - self.low) / step)
        return [self.low + step * number for number in range(count + 1)]

    def _decades(self) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        found: list[float] = []
        for digits in ((1, 2, 5), (1, 3), (1,)):
            numbers = [digit * 10.0**power for power in range(first, last + 1) for digit in digits]
            found = [number for number in numbers if self.low <= number <= self.high]
            if len(found) <= _TICKS + 1:
                break
        return found[:: max(1, -(-len(found) // (_TICKS + 1)))] or [math.sqrt(self.low * self.high)]


def nice_step(least: float) -> float:
    """1, 2, 2.5 or 5 times a power of ten, at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(
        each * power for each in (1.0, 2.0, 2.5, 5.0, 10.0) if each * power >= least * 0.999
    )


def _paths(series: Series, xs: Floats, ys: Floats) -> list[Path]:
    classes = f"{series.mark.value} {series.stroke.value}"
    known = ~np.isnan(xs)
    if not known.any():
        return []
    if series.mark is Mark.DOTS:
        return [Path(_dots(xs[known], ys[known]), series.run, series.label, classes)]
    line = Path(_line(xs, ys, steps=series.mark is Mark.STEPS), series.run, series.label, classes)
    if series.mark is not Mark.POINTED:
        return [line]
    return [line, Path(_dots(xs[known], ys[known]), series.run, series.label, "dots large")]


def _dots(xs: Floats, ys: Floats) -> str:
    return "".join(f"M{_n(x)} {_n(y)}h0" for x, y in zip(xs.tolist(), ys.tolist(), strict=True))


def _line(xs: Floats, ys: Floats, *, steps: bool) -> str:
    parts, inside = [], False
    for x, y in zip(xs.tolist(), ys.tolist(), strict=True):
        if math.isnan(x):
            inside = False
        elif not inside:
            parts.append(f"M{_n(x)} {_n(y)}")
            inside = True
        else:
            parts.append(f"H{_n(x)}V{_n(y)}" if steps else f"L{_n(x)} {_n(y)}")
    return "".join(parts)


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def thinned(count: int, most: int = DOTS_MAX) -> NDArray[np.int64]:
    """Places of every n-th of `count`, at most `most` of them."""
    return np.arange(0, count, max(1, -(-count // most)))


def distribution(values: Floats) -> tuple[Floats, Floats]:
    """Values and the share of all that is not above them, finer towards the tail."""
    known = np.sort(values[~np.isnan(values)])
    if not known.size:
        return known, known
    if known.size <= POINTS_MAX:
        return known, np.arange(1, known.size + 1) / known.size
    body = np.linspace(0.0, 0.98, POINTS_MAX - 101)
    shares = np.concatenate([body, np.linspace(0.98, 1.0, 102)[1:]])
    places = np.minimum((shares * known.size).astype(np.int64), known.size - 1)
    return known[places], (places + 1) / known.size


def spread(count: Sequence[float]) -> bool:
    """Whether values need a logarithmic axis: above 0 and apart by more than thirty times."""
    known = [value for value in count if value > 0 and math.isfinite(value)]
    return bool(known) and max(known) > 30 * min(known)
