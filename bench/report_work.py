"""Figures of what was computed and moved: by worker, and beside what was asked for and cached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bench.plots import Axis, Mark, Plot, Series, Stroke, Table, thinned
from bench.report_latency import thinned_text
from bench.report_text import count, share, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.record import Floats, Texts
    from bench.report_runs import RunView

RUNS_SHOWN = 4
"""With more runs the page would be mostly workers."""
WORKERS_SHOWN = 24
"""Of more workers the most and the least busy ones are shown."""


@dataclass(frozen=True, slots=True)
class WorkerBar:
    """What one worker did; `part` is its work beside that of the busiest of its side, 0 to 1."""

    name: str
    requests: str
    tokens: str
    part: float


@dataclass(frozen=True, slots=True)
class WorkerSide:
    """The workers of one run that computed prompts, or answers."""

    run: int
    label: str
    title: str
    bars: tuple[WorkerBar, ...]
    told: str


def worker_sides(runs: Sequence[RunView]) -> tuple[WorkerSide, ...]:
    """Two of each run; none of a run that does not name its workers, and none of many runs."""
    if len(runs) > RUNS_SHOWN:
        return ()
    sides = []
    for run in runs:
        requests = run.record.requests
        computed = requests.prompt_tokens - np.nan_to_num(requests.cached_tokens, nan=0.0)
        for title, workers, tokens in (
            ("prompt tokens computed", requests.prefill_worker, computed),
            ("answer tokens", requests.decode_worker, requests.answer_tokens),
        ):
            side = _side(run, title, workers, tokens)
            if side is not None:
                sides.append(side)
    return tuple(sides)


def _side(run: RunView, title: str, workers: Texts, tokens: Floats) -> WorkerSide | None:
    names = sorted({name for name in workers if name is not None})
    if not names:
        return None
    places = {name: place for place, name in enumerate(names)}
    of = np.array([-1 if name is None else places[name] for name in workers])
    named = of >= 0
    requests = np.bincount(of[named], minlength=len(names))
    sums = np.bincount(of[named], np.nan_to_num(tokens, nan=0.0)[named], len(names))
    order = np.argsort(-sums, kind="stable")
    half = WORKERS_SHOWN // 2
    shown = order if order.size <= WORKERS_SHOWN else np.concatenate([order[:half], order[-half:]])
    most = max(float(sums.max()), 1.0)
    bars = tuple(
        WorkerBar(names[n], count(float(requests[n])), count(float(sums[n])), float(sums[n]) / most)
        for n in shown.tolist()
    )
    mean = float(sums.mean())
    told = f"{len(names)} workers; the busiest has {sums.max() / mean:.2f} times the mean."
    if mean == 0:
        told = f"{len(names)} workers without work."
    if order.size > WORKERS_SHOWN:
        told += f" Shown are the {half} that did most and the {half} that did least."
    return WorkerSide(run.place, run.label, title, bars, told)


def moved_plot(runs: Sequence[RunView]) -> Plot:
    """Tokens whose KV was moved, beside the prompt's tokens that were not cached."""
    series, rows, most = [], [], 0.0
    for run in runs:
        requests = run.record.requests
        computed = requests.prompt_tokens - requests.cached_tokens
        known = np.flatnonzero(~np.isnan(requests.moved_tokens) & ~np.isnan(computed))
        drawn = known[thinned(known.size)]
        if drawn.size:
            most = max(most, float(computed[drawn].max()))
            moved = requests.moved_tokens[drawn]
            series.append(Series(run.label, run.place, computed[drawn], moved, Mark.DOTS))
        rows.append(_moved_row(run))
    if most:
        ends = np.array([0.0, most])
        series.append(Series("as many as computed", -1, ends, ends, Mark.LINE, Stroke.DOTTED))
    return Plot(
        name="moved",
        title="Moved tokens",
        told="Each dot is a request: prompt tokens that the prefill worker computed, and tokens "
        "whose KV went to the decode worker. Above the dotted line are those whose decode worker "
        "lacked what the prefill worker had cached, below those whose decode worker had it."
        + thinned_text(runs),
        x=Axis("prompt tokens not cached", count),
        y=Axis("moved tokens", count),
        series=tuple(series),
        table=Table(
            ("run", "prompt", "cached", "moved", "moved of prompt", "moved", "per moved token"),
            tuple(rows),
        ),
    )


def _moved_row(run: RunView) -> tuple[str, ...]:
    requests = run.record.requests
    prompt, cached, moved, moved_bytes = (
        float(np.nansum(each)) if (~np.isnan(each)).any() else None
        for each in (
            requests.prompt_tokens,
            requests.cached_tokens,
            requests.moved_tokens,
            requests.moved_bytes,
        )
    )
    part = moved / prompt if moved is not None and prompt else None
    each_token = moved_bytes / moved if moved_bytes is not None and moved else None
    return (
        run.label,
        *(count(value) for value in (prompt, cached, moved)),
        share(part),
        size(moved_bytes),
        size(each_token),
    )
