"""Figures over the time of a run: rates, what was running, what was not served, what was cached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bench.plots import Axis, Mark, Plot, Series, Stroke, Table
from bench.record import Outcome
from bench.report_text import count, plain, seconds, share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.record import Floats
    from bench.report_runs import RunView

_BINS = 60
_TABLE_ROWS = 12


@dataclass(frozen=True, slots=True, eq=False)
class _Course:
    """A run in bins of equal time; [bins] each."""

    run: RunView
    edges: Floats
    arrived: Floats
    done: Floats
    unserved: Floats
    running: Floats
    """At the end of each bin."""
    hits: Floats
    prompts: Floats
    """Cached and all prompt tokens of the requests that arrived in it and tell both."""

    @property
    def width_s(self) -> float:
        return float(self.edges[1] - self.edges[0])

    @property
    def middle_s(self) -> Floats:
        return (self.edges[:-1] + self.edges[1:]) / 2


def timeline_plots(runs: Sequence[RunView]) -> tuple[Plot, ...]:
    """Rates, running, refusals and failures, hits."""
    courses = [_course(run) for run in runs]
    return (_rates(courses), _running(courses), _unserved(courses), _hits(courses))


def _course(run: RunView) -> _Course:
    requests = run.record.requests
    ends, began = requests.end_s, run.began_s
    last = np.nanmax(np.concatenate([ends, began, [run.duration_s]]))
    edges = np.linspace(0.0, float(last), _BINS + 1)
    unserved = np.array([o in (Outcome.REFUSED, Outcome.FAILED) for o in requests.outcome])
    known = ~np.isnan(requests.cached_tokens) & ~np.isnan(requests.prompt_tokens) & ~np.isnan(began)
    # Without an end it never left and never ran.
    lived = ~np.isnan(began) & ~np.isnan(ends)
    inside = np.searchsorted(np.sort(began[lived]), edges[1:], side="right") - np.searchsorted(
        np.sort(ends[lived]), edges[1:], side="right"
    )
    when = np.where(np.isnan(ends), began, ends)
    return _Course(
        run,
        edges,
        arrived=_counted(began, edges),
        done=_counted(ends[requests.done], edges),
        unserved=_counted(when[unserved] if unserved.size else when, edges),
        running=inside.astype(np.float64),
        hits=_counted(began[known], edges, requests.cached_tokens[known]),
        prompts=_counted(began[known], edges, requests.prompt_tokens[known]),
    )


def _counted(when: Floats, edges: Floats, weights: Floats | None = None) -> Floats:
    known = ~np.isnan(when)
    found: Floats = np.histogram(
        when[known], edges, weights=None if weights is None else weights[known]
    )[0].astype(np.float64)
    return found


def _rates(courses: Sequence[_Course]) -> Plot:
    series = []
    for each in courses:
        for values, label, stroke in (
            (each.arrived, "arrived", Stroke.DASHED),
            (each.done, "done", Stroke.WHOLE),
        ):
            rate = values / each.width_s
            series.append(_line(each, f"{each.run.label}, {label}", rate, stroke))
    rows = _rows(courses, lambda each: (each.arrived / each.width_s, each.done / each.width_s))
    return Plot(
        name="rates",
        title="Requests per second",
        told=f"Requests that arrived and answers that were completed, in {_BINS} parts of the run.",
        x=_TIME,
        y=Axis("requests/s", plain),
        series=tuple(series),
        table=Table(("run and time", "arrived/s", "done/s"), rows),
        legend=(("done", Stroke.WHOLE), ("arrived", Stroke.DASHED)),
    )


def _running(courses: Sequence[_Course]) -> Plot:
    return Plot(
        name="running",
        title="In the system",
        told="Requests that had arrived and had not ended, waiting ones included.",
        x=_TIME,
        y=Axis("requests", count),
        series=tuple(_line(each, each.run.label, each.running) for each in courses),
        table=Table(("run and time", "requests"), _rows(courses, lambda each: (each.running,))),
    )


def _unserved(courses: Sequence[_Course]) -> Plot:
    total = sum(float(each.unserved.sum()) for each in courses)
    told = "Requests that were refused or failed, by when that was known."
    return Plot(
        name="unserved",
        title="Refused and failed",
        told=told if total else f"{told} There were none.",
        x=_TIME,
        y=Axis("requests/s", plain),
        series=tuple(_line(each, each.run.label, each.unserved / each.width_s) for each in courses),
        table=Table(
            ("run", *(o.value for o in Outcome), "errors"),
            tuple(_outcomes(each.run) for each in courses),
        ),
    )


def _outcomes(run: RunView) -> tuple[str, ...]:
    requests = run.record.requests
    codes = sorted({error for error in requests.error if error is not None})
    told = ", ".join(f"{code}: {requests.error.count(code)}" for code in codes[:8])
    return (run.label, *(count(requests.outcome.count(o)) for o in Outcome), told or "none")


def _hits(courses: Sequence[_Course]) -> Plot:
    def rate(each: _Course) -> Floats:
        nothing = np.full(each.hits.shape, np.nan)
        found: Floats = np.divide(each.hits, each.prompts, out=nothing, where=each.prompts > 0)
        return found

    return Plot(
        name="hits",
        title="Cached prompt tokens",
        told="Of the prompt tokens that arrived in each part of the run, the share that nobody "
        "had to compute. The table has the tokens as well.",
        x=_TIME,
        y=Axis("share of prompt tokens", share),
        series=tuple(_line(each, each.run.label, rate(each)) for each in courses),
        table=Table(
            ("run and time", "cached tokens/s", "prompt tokens/s", "share"),
            _rows(
                courses,
                lambda each: (each.hits / each.width_s, each.prompts / each.width_s),
                lambda values: share(values[0] / values[1] if values[1] else None),
            ),
        ),
    )


_TIME = Axis("since the start", seconds)


def _line(each: _Course, label: str, values: Floats, stroke: Stroke = Stroke.WHOLE) -> Series:
    return Series(label, each.run.place, each.middle_s, values, Mark.LINE, stroke)


def _rows(courses: Sequence[_Course], figures: _Figures, last: _Last | None = None) -> _TableRows:
    """Every fifth bin of each run: a table is for reading."""
    rows = []
    for each in courses:
        columns = figures(each)
        for place in range(0, _BINS, _BINS // _TABLE_ROWS):
            values = [float(column[place]) for column in columns]
            when = f"{each.run.label}, {seconds(float(each.middle_s[place]))}"
            end = () if last is None else (last(values),)
            rows.append((when, *(count(value) for value in values), *end))
    return tuple(rows)


if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    _Figures: TypeAlias = Callable[[_Course], tuple[Floats, ...]]
    _Last: TypeAlias = Callable[[list[float]], str]
    _TableRows: TypeAlias = tuple[tuple[str, ...], ...]
