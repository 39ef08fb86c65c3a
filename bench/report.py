"""The report on one or more runs: a single file of HTML that needs nothing else.

    write_report([read_record(path)], Path("report.html"))

It has no script and asks for nothing from anywhere, which its own content policy enforces; all that
comes from a record is escaped by the template. Every plot has its numbers in a table below it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import jinja2

from bench.compare import Comparison, Verdict, compare, flat_about
from bench.plots import Frame, Plot, Table, frame
from bench.report_latency import latency_plots
from bench.report_runs import RunView, views
from bench.report_sweep import duel_of, sweep_of, sweep_plots
from bench.report_text import count, plain, seconds, share, size
from bench.report_time import timeline_plots
from bench.report_work import moved_plot, worker_sides
from kvferry.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from bench.record import RunRecord

RUNS_MAX = 64
_COLORS = 6
_VALUE_LENGTH_MAX = 300


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with its plots."""

    name: str
    title: str
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class RunHead:
    """What the top of the page says of a run."""

    place: int
    label: str
    facts: tuple[str, ...]
    warnings: tuple[str, ...]


def write_report(records: Sequence[RunRecord], path: Path, title: str | None = None) -> None:
    """Write the page. Raises `InvalidInput` without a run or with too many, and `OSError`."""
    path.write_text(render_report(records, title), encoding="utf-8")


def render_report(records: Sequence[RunRecord], title: str | None = None) -> str:
    """The page as text; the same for the same records."""
    if not 1 <= len(records) <= RUNS_MAX:
        raise InvalidInput("runs", f"a report has 1 to {RUNS_MAX}, not {len(records)}")
    runs = views(records)
    sweep = sweep_of(runs)
    pair = (runs[0], runs[1]) if len(runs) == 2 else None
    return _template().render(
        title=title or " beside ".join(dict.fromkeys(run.record.about.name for run in runs)),
        style=files("bench").joinpath("report.css").read_text(encoding="utf-8"),
        heads=[_head(run) for run in runs],
        colors=_COLORS,
        summary=_summary(runs),
        sections=_sections(runs),
        sweep=sweep,
        sweep_names=() if sweep is None else tuple(sweep.lines),
        duel=None if sweep is None else duel_of(sweep),
        sweep_frames=() if sweep is None else _frames(sweep_plots(sweep)),
        comparison=None if pair is None else _compared(compare(pair[0].record, pair[1].record)),
        labels=[run.label for run in runs],
        sides=worker_sides(runs),
        circumstances=_circumstances(runs),
    )


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(
        files("bench").joinpath("report.html.jinja").read_text(encoding="utf-8")
    )


def _sections(runs: Sequence[RunView]) -> tuple[Section, ...]:
    return (
        Section("latency", "Latency", _frames(latency_plots(runs))),
        Section("time", "Over time", _frames(timeline_plots(runs))),
        Section("work", "Work and transfer", _frames((moved_plot(runs),))),
    )


def _frames(plots: Sequence[Plot]) -> tuple[Frame, ...]:
    return tuple(frame(plot) for plot in plots)


def _head(run: RunView) -> RunHead:
    about, requests = run.record.about, run.record.requests
    warnings = [*about.warnings]
    if about.interrupted:
        warnings.insert(0, "Interrupted: the record is a part of the run.")
    facts: tuple[str, ...] = (
        about.kind.value,
        f"{count(len(requests))} requests in {seconds(about.duration_s)}",
        f"load {about.mode.value}",
        f"dataset {about.dataset.get('name', 'without a name')}",
        about.endpoint,
    )
    if about.kind.value == "measured":
        facts = (*facts, about.started)
    return RunHead(run.place, run.label, facts, tuple(warnings))


def _summary(runs: Sequence[RunView]) -> Table:
    """A column per run; they are beside each other to be compared."""
    columns = [_summary_column(run) for run in runs]
    rows = tuple((name, *(each[name] for each in columns)) for name in columns[0])
    return Table(("", *(run.label for run in runs)), rows)


def _summary_column(run: RunView) -> dict[str, str]:
    summary = run.record.summary
    requests, rates, goodput = summary["requests"], summary["throughput"], summary["goodput"]
    column = {
        "requests": count(requests["all"]),
        "done / refused / failed / cancelled": " / ".join(
            count(requests[name]) for name in ("done", "refused", "failed", "cancelled")
        ),
        "throughput, requests/s": plain(rates["requests_per_s"]),
        "prompt tokens/s": count(rates["prompt_tokens_per_s"]),
        "answer tokens/s": count(rates["answer_tokens_per_s"]),
        "goodput, requests/s": plain(None if goodput is None else goodput["requests_per_s"]),
        "within both targets": share(None if goodput is None else goodput["share"]),
    }
    for name, key in (("TTFT", "ttft_s"), ("ITL", "itl_mean_s"), ("E2E", "e2e_s")):
        for part in ("p50", "p90", "p99"):
            column[f"{name} {part}"] = seconds(summary[key][part])
    return {
        **column,
        "longest gap in an answer, p99": seconds(summary["itl_max_s"]["p99"]),
        "hit rate": share(summary["hit_rate"]),
        "moved": size(summary["moved_bytes"]),
        "sent late, p99": seconds(summary["late_s"]["p99"]),
    }


def _compared(comparison: Comparison) -> dict[str, Any]:
    return {
        "table": comparison_table(comparison),
        "verdicts": [_verdict_class(row.better) for row in comparison.rows],
        "told": comparison_text(comparison),
        "notes": comparison.notes,
    }


def _verdict_class(better: bool | None) -> str:
    return {None: "same", True: "better", False: "worse"}[better]


def comparison_table(comparison: Comparison) -> Table:
    """The figures of two runs, as text."""
    shown = {"s": seconds, "share": share, "requests/s": plain, "tokens/s": count}
    rows = []
    for row in comparison.rows:
        show = shown[row.unit]
        interval = "–"  # noqa: RUF001 - an en dash is nothing in tables
        if row.low is not None and row.high is not None:
            interval = f"{plain(row.low)} to {plain(row.high)}"
        verdict = row.verdict.value
        if row.verdict in (Verdict.LOWER, Verdict.HIGHER):
            verdict = f"{verdict}: {'better' if row.better else 'worse'}"
        name = row.name if row.unit in ("s", "share") else f"{row.name}, {row.unit}"
        rows.append((name, show(row.a), show(row.b), plain(row.ratio), interval, verdict))
    interval_name = f"{comparison.level:.0%} interval"
    return Table(("", "A", "B", "B / A", interval_name, "B is"), tuple(rows))


def comparison_text(comparison: Comparison) -> str:
    """How it was compared, in plain words."""
    a, b = comparison.blocks
    how = (
        f"paired: both runs sent the same requests, and blocks of {a} of them were drawn from both"
        if comparison.paired
        else f"not paired: blocks of {a} requests of A and of {b} of B were drawn"
    )
    outside = (1.0 - comparison.level) * len(comparison.rows)
    return (
        f"Intervals of the ratio from {comparison.resamples} samples ({how}). Of "
        f"{len(comparison.rows)} figures about {plain(outside)} would seem to differ by chance."
    )


def _circumstances(runs: Sequence[RunView]) -> list[tuple[str, bool, list[str]]]:
    """Name, whether runs differ in it, and each run's value as text."""
    leaves: Sequence[Mapping[str, Any]] = [flat_about(run.record) for run in runs]
    names = dict.fromkeys(name for each in leaves for name in each)
    found = []
    for name in names:
        texts = [_value(each[name]) if name in each else "" for each in leaves]
        found.append((name, len(set(texts)) > 1, texts))
    # What differs first: it is what a reader of several runs looks for.
    return sorted(found, key=lambda each: not each[1])


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _VALUE_LENGTH_MAX else f"{text[:_VALUE_LENGTH_MAX]} …"
