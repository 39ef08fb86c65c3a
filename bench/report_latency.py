"""Figures of how long answers took: distributions, TTFT by prompt length, what targets allow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bench.plots import (
    DOTS_MAX,
    Axis,
    Mark,
    Plot,
    Series,
    Stroke,
    Table,
    distribution,
    spread,
    thinned,
)
from bench.report_runs import per_bin, quantile
from bench.report_text import count, plain, seconds, share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.record import Floats
    from bench.report_runs import RunView

_SHARES = (0.5, 0.9, 0.95, 0.99)
_TOLD = {
    "TTFT": "Time to the first token of complete answers",
    "ITL": "Mean time between two tokens, of each complete answer",
    "E2E": "Time to the end of complete answers",
}
_PROMPT_BINS = 12
_LIMITS = 60


def latency_plots(runs: Sequence[RunView]) -> tuple[Plot, ...]:
    """All of them; those of which no run tells anything are empty."""
    cumulative = [_distribution(name, told, runs) for name, told in _TOLD.items()]
    return (*cumulative, _by_prompt(runs), _by_limit(runs))


def _distribution(name: str, told: str, runs: Sequence[RunView]) -> Plot:
    values = [run.latencies[name] for run in runs]
    points = [distribution(each) for each in values]
    ends = [end for each in values for end in (quantile(each, 0.0), quantile(each, 1.0))]
    rows = tuple(
        (
            run.label,
            count(float((~np.isnan(each)).sum())),
            *(seconds(quantile(each, at)) for at in _SHARES),
            seconds(float(np.nanmean(each)) if (~np.isnan(each)).any() else None),
            seconds(quantile(each, 1.0)),
        )
        for run, each in zip(runs, values, strict=True)
    )
    return Plot(
        name=f"cdf-{name.lower()}",
        title=name,
        told=f"{told}: the share of them that took no longer.",
        x=Axis(name, seconds, logarithmic=spread(ends)),
        y=Axis("share of answers", share),
        series=tuple(
            Series(run.label, run.place, x, y, Mark.STEPS)
            for run, (x, y) in zip(runs, points, strict=True)
        ),
        table=Table(("run", "answers", "p50", "p90", "p95", "p99", "mean", "max"), rows),
    )


def _by_prompt(runs: Sequence[RunView]) -> Plot:
    series, rows = [], []
    lengths = [run.record.requests.prompt_tokens for run in runs]
    edges = _edges(lengths)
    for run, prompt in zip(runs, lengths, strict=True):
        known = np.flatnonzero(~np.isnan(run.ttft_s) & ~np.isnan(prompt))
        drawn = known[thinned(known.size)]
        series.append(Series(run.label, run.place, prompt[drawn], run.ttft_s[drawn], Mark.DOTS))
        if edges.size < 2:
            continue
        middle = (edges[:-1] + edges[1:]) / 2
        p50 = per_bin(prompt, run.ttft_s, edges, lambda part: float(np.median(part)))
        p90 = per_bin(prompt, run.ttft_s, edges, lambda part: float(np.quantile(part, 0.9)))
        series.append(Series(f"{run.label}, p50", run.place, middle, p50, Mark.LINE))
        series.append(Series(f"{run.label}, p90", run.place, middle, p90, Mark.LINE, Stroke.DASHED))
        rows += [
            (f"{run.label}, {count(a)} to {count(b)} tokens", seconds(low), seconds(high))
            for a, b, low, high in zip(edges[:-1], edges[1:], p50, p90, strict=True)
            if not np.isnan(low)
        ]
    return Plot(
        name="ttft-by-prompt",
        title="TTFT by prompt length",
        told="Each dot is an answer; lines are p50 and p90 of those with prompts about as long."
        + thinned_text(runs),
        x=Axis("prompt tokens", count),
        y=Axis("TTFT", seconds),
        series=tuple(series),
        table=Table(("prompts", "TTFT p50", "TTFT p90"), tuple(rows)),
        legend=(("p50", Stroke.WHOLE), ("p90", Stroke.DASHED)),
    )


def thinned_text(runs: Sequence[RunView]) -> str:
    """Says of how many requests a dot is drawn, if not of all."""
    most = max((len(run.record.requests) for run in runs), default=0)
    if most <= DOTS_MAX:
        return ""
    return f" Of long runs every n-th request is a dot, at most {count(DOTS_MAX)} of each run."


def _edges(lengths: Sequence[Floats]) -> Floats:
    """Of bins with about as many prompts each; fewer than two where there is one length."""
    known = np.concatenate([each[~np.isnan(each)] for each in lengths])
    if not known.size or known.min() == known.max():
        return np.empty(0)
    edges = np.unique(np.quantile(known, np.linspace(0.0, 1.0, _PROMPT_BINS + 1)))
    edges[-1] += 1.0
    return edges


def _by_limit(runs: Sequence[RunView]) -> Plot:
    """Goodput as it were with other targets of TTFT, that of ITL kept."""
    known = [run.ttft_s[~np.isnan(run.ttft_s)] for run in runs]
    joined = np.concatenate(known) if known else np.empty(0)
    joined = joined[joined > 0]
    limits = np.empty(0)
    if joined.size:
        low, high = np.quantile(joined, (0.01, 1.0)).tolist()
        limits = np.geomspace(low, max(high, low * 1.2), _LIMITS)
    series, rows = [], []
    for run in runs:
        targets = run.record.about.targets
        held = ~np.isnan(run.ttft_s)
        if targets is not None:
            held &= np.nan_to_num(run.itl_s, nan=0.0) <= targets.itl_s
        times = np.sort(run.ttft_s[held])
        rates = np.searchsorted(times, limits, side="right") / run.duration_s
        series.append(Series(run.label, run.place, limits, rates))
        goodput = run.record.summary["goodput"]
        rows.append(
            (
                run.label,
                seconds(None if targets is None else targets.ttft_s),
                seconds(None if targets is None else targets.itl_s),
                plain(None if goodput is None else goodput["requests_per_s"]),
                share(None if goodput is None else goodput["share"]),
            )
        )
    return Plot(
        name="goodput-by-limit",
        title="Goodput by what is accepted",
        told="Complete answers per second whose first token came within the limit; the target of "
        "ITL, where a run has one, is kept, too. The table has the run's own targets.",
        x=Axis("limit of TTFT", seconds, logarithmic=True),
        y=Axis("answers/s", plain),
        series=tuple(series),
        table=Table(("run", "TTFT target", "ITL target", "goodput/s", "share"), tuple(rows)),
    )
