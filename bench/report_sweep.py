"""Runs of one name at several rates or mixes as lines, and two names beside each other.

A sweep of two configurations shows where one of them wins and where it loses: at each swept value
both runs are compared (`bench.compare`), and a winner is named only where 1 is not in the interval.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bench.compare import Comparison, Row, compare
from bench.plots import Axis, Mark, Plot, Series, Table
from bench.report_runs import quantile, swept_name, swept_value
from bench.report_text import plain, seconds, share

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from bench.report_runs import RunView

_COMPARED = ("TTFT p50", "TTFT p90", "ITL p50", "ITL p90", "throughput", "goodput", "hit rate")
"""Figures of a duel, as `bench.compare` names them."""
_RESAMPLES = 1000
"""Fewer than of one comparison: there may be dozens of them."""


@dataclass(frozen=True, slots=True)
class DuelCell:
    """One figure of two runs at one swept value."""

    text: str
    interval: str
    winner: int | None
    """0 or 1; None where no difference was seen."""


@dataclass(frozen=True, slots=True)
class Duel:
    """Two configurations at each swept value that both have."""

    names: tuple[str, str]
    swept: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, tuple[DuelCell, ...]], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Sweep:
    """What changes from run to run, and the runs of each name in its order."""

    swept: str
    lines: Mapping[str, Sequence[tuple[float, RunView]]]


def sweep_of(runs: Sequence[RunView]) -> Sweep | None:
    """None where no two runs of one name differ in a number of their load or dataset."""
    swept = swept_name([run.record for run in runs])
    if swept is None:
        return None
    lines: dict[str, list[tuple[float, RunView]]] = {}
    for run in runs:
        value = swept_value(run.record, swept)
        if value is not None:
            lines.setdefault(run.record.about.name, []).append((value, run))
    return Sweep(
        swept, {name: sorted(line, key=lambda each: each[0]) for name, line in lines.items()}
    )


def sweep_plots(sweep: Sweep) -> tuple[Plot, ...]:
    """Goodput, TTFT and ITL over what was swept."""
    figures: tuple[tuple[str, str, Callable[[float], str], _Figure], ...] = (
        ("goodput", "Goodput", plain, _goodput),
        ("served", "Complete answers per second", plain, _throughput),
        ("attained", "Requests within both targets", share, _attained),
        ("ttft-p90", "TTFT p90", seconds, lambda run: quantile(run.ttft_s, 0.9)),
        ("itl-p90", "ITL p90", seconds, lambda run: quantile(run.itl_s, 0.9)),
        ("hit-rate", "Hit rate", share, lambda run: _number(run.record.summary["hit_rate"])),
    )
    return tuple(_plot(sweep, *each) for each in figures)


def _plot(
    sweep: Sweep,
    name: str,
    title: str,
    show: Callable[[float], str],
    figure: _Figure,
) -> Plot:
    series, rows = [], []
    for place, (label, line) in enumerate(sweep.lines.items()):
        x = np.array([value for value, _ in line])
        y = np.array([figure(run) for _, run in line])
        series.append(Series(label, place, x, y, Mark.POINTED))
        rows += [(f"{label}, {a:g}", show(b)) for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    return Plot(
        name=f"sweep-{name}",
        title=title,
        told=f"Of each run, over {sweep.swept}.",
        x=Axis(sweep.swept, lambda value: f"{value:g}"),
        y=Axis(title, show),
        series=tuple(series),
        table=Table((f"run, {sweep.swept}", title), tuple(rows)),
    )


def _goodput(run: RunView) -> float:
    goodput = run.record.summary["goodput"]
    return _number(None if goodput is None else goodput["requests_per_s"])


def _attained(run: RunView) -> float:
    goodput = run.record.summary["goodput"]
    return _number(None if goodput is None else goodput["share"])


def _throughput(run: RunView) -> float:
    return _number(run.record.summary["throughput"]["requests_per_s"])


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def duel_of(sweep: Sweep) -> Duel | None:
    """None unless there are exactly two names with a swept value in common."""
    if len(sweep.lines) != 2:
        return None
    (first, left), (second, right) = sweep.lines.items()
    found = dict(right)
    pairs = [(value, run, found[value]) for value, run in left if value in found]
    compared = [(value, compare(a.record, b.record, resamples=_RESAMPLES)) for value, a, b in pairs]
    if not compared:
        return None
    header = [row.name for row in compared[0][1].rows if row.name in _COMPARED]
    rows = tuple((f"{value:g}", _cells(each, header)) for value, each in compared)
    return Duel((first, second), sweep.swept, tuple(header), rows)


def _cells(comparison: Comparison, header: Sequence[str]) -> tuple[DuelCell, ...]:
    rows = {row.name: row for row in comparison.rows}
    return tuple(_cell(rows[name]) if name in rows else _NOTHING for name in header)


def _cell(row: Row) -> DuelCell:
    if row.ratio is None:
        return _NOTHING
    interval = "too few requests"
    if row.low is not None and row.high is not None:
        interval = f"{plain(row.low)} to {plain(row.high)}"
    winner = None if row.better is None else int(row.better)
    return DuelCell(f"×{plain(row.ratio)}", interval, winner)  # noqa: RUF001 - times, no letter


_NOTHING = DuelCell("–", "not known", None)  # noqa: RUF001 - an en dash is nothing in tables

if TYPE_CHECKING:
    from typing import TypeAlias

    _Figure: TypeAlias = Callable[[RunView], float]
