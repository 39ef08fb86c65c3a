"""Two runs side by side: how far each figure of the second is from the first, and how sure that is.

    comparison = compare(read_record(a), read_record(b))

The ratio B / A of each figure has an interval (`bench.intervals`). An interval with 1 in it says
that no difference was seen, not that there is none. Where both runs sent the same requests in the
same order, the same blocks are drawn from both (*paired*): what makes a block of prompts slow in
both runs then takes nothing from how well they can be told apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.intervals import Draws, block_length, draw, interval, ratio
from bench.record import LoadMode, Outcome
from bench.summary import hit_rate, within_targets

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench.record import Floats, Requests, RunRecord, Targets

RESAMPLES = 2000
LEVEL = 0.95
_SHARES = (0.5, 0.9, 0.99)
_LATENCIES = ("TTFT", "ITL", "E2E")
_TOLD_APART = ("dataset", "load", "endpoint", "config", "versions", "machine", "seed", "kind")


class Verdict(Enum):
    """What the interval of a ratio says."""

    LOWER = "lower"
    HIGHER = "higher"
    NO_DIFFERENCE = "no difference seen"
    UNKNOWN = "too little is known"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of both runs."""

    name: str
    unit: str
    lower_is_better: bool
    a: float | None
    b: float | None
    ratio: float | None
    low: float | None
    high: float | None

    @property
    def verdict(self) -> Verdict:
        """Of B beside A."""
        if self.low is None or self.high is None:
            return Verdict.UNKNOWN
        if self.low > 1.0:
            return Verdict.HIGHER
        return Verdict.LOWER if self.high < 1.0 else Verdict.NO_DIFFERENCE

    @property
    def better(self) -> bool | None:
        """Whether B is the better one; None where no difference was seen."""
        if self.verdict in (Verdict.UNKNOWN, Verdict.NO_DIFFERENCE):
            return None
        return (self.verdict is Verdict.LOWER) == self.lower_is_better


@dataclass(frozen=True, slots=True)
class Comparison:
    """All figures of two runs."""

    names: tuple[str, str]
    paired: bool
    level: float
    resamples: int
    seed: int
    blocks: tuple[int, int]
    """Requests in a block that was drawn, of each run."""
    rows: tuple[Row, ...]
    outcomes: tuple[Mapping[str, int], Mapping[str, int]]
    differs: tuple[tuple[str, Any, Any], ...]
    """What else is not the same in both: dotted name, value in A, value in B."""
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "a": self.names[0],
            "b": self.names[1],
            "paired": self.paired,
            "level": self.level,
            "resamples": self.resamples,
            "seed": self.seed,
            "block_requests": list(self.blocks),
            "outcomes": [dict(each) for each in self.outcomes],
            "figures": [_row_json(row) for row in self.rows],
            "differs": [{"name": n, "a": a, "b": b} for n, a, b in self.differs],
            "notes": list(self.notes),
        }


def _row_json(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "unit": row.unit,
        "a": row.a,
        "b": row.b,
        "ratio": row.ratio,
        "low": row.low,
        "high": row.high,
        "verdict": row.verdict.value,
        "b_is_better": row.better,
    }


@dataclass(frozen=True, slots=True, eq=False)
class _Series:
    """A run's requests in the order of their sending, [requests] each."""

    latencies: Mapping[str, Floats]
    """Of complete answers, NaN of the others."""
    done: Floats
    held: Floats | None
    """Within both targets; None where there are none."""
    answer_tokens: Floats
    gaps_s: Floats
    """To the next sending, of the last one to the end of the run: they sum up to its length."""
    prompt_tokens: Floats
    cached_tokens: Floats


def compare(
    a: RunRecord,
    b: RunRecord,
    targets: Targets | None = None,
    *,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
    seed: int = 0,
) -> Comparison:
    """B beside A. `targets` judge both; None: their own, where these are the same."""
    if targets is None and a.about.targets == b.about.targets:
        targets = a.about.targets
    paired = same_requests(a.requests, b.requests)
    series = (_series_of(a, targets, by_index=paired), _series_of(b, targets, by_index=paired))
    blocks = (_block_of(series[0]), _block_of(series[1]))
    if paired:
        blocks = (max(blocks), max(blocks))
    draws = [
        draw(len(each.done), block, resamples, seed if paired else seed + 2 * place + 1)
        if len(each.done)
        else None
        for place, (each, block) in enumerate(zip(series, blocks, strict=True))
    ]
    known = None if draws[0] is None or draws[1] is None else (draws[0], draws[1])
    return Comparison(
        names=(a.about.name, b.about.name),
        paired=paired,
        level=level,
        resamples=resamples,
        seed=seed,
        blocks=blocks,
        rows=tuple(_rows(_figures(series, known), known, level)),
        outcomes=(outcomes_of(a.requests), outcomes_of(b.requests)),
        differs=tuple(differences(a, b)),
        notes=tuple(_notes(a, b, targets)),
    )


def same_requests(a: Requests, b: Requests) -> bool:
    """Whether both runs sent the same requests: of the same sessions, with prompts as long."""
    if len(a) != len(b) or not len(a):
        return False
    left, right = np.argsort(a.index, kind="stable"), np.argsort(b.index, kind="stable")
    return all(
        np.array_equal(x[left], y[right])
        for x, y in (
            (a.index, b.index),
            (a.session, b.session),
            (a.prompt_tokens, b.prompt_tokens),
        )
    )


def outcomes_of(requests: Requests) -> dict[str, int]:
    """How many requests ended in which way."""
    return {each.value: requests.outcome.count(each) for each in Outcome}


def _series_of(run: RunRecord, targets: Targets | None, *, by_index: bool) -> _Series:
    requests, mode = run.requests, run.about.mode
    began = requests.began_s(mode)
    order = np.argsort(requests.index if by_index else began, kind="stable")
    done = requests.done
    latencies = {
        "TTFT": requests.ttft_s(mode),
        "ITL": requests.itl_mean_s,
        "E2E": requests.e2e_s(mode),
    }
    held = None if targets is None else within_targets(requests, mode, targets)
    return _Series(
        {name: np.where(done, times, np.nan)[order] for name, times in latencies.items()},
        done[order].astype(np.float64),
        None if held is None else held[order].astype(np.float64),
        np.nan_to_num(requests.answer_tokens, nan=0.0)[order],
        _gaps(began[order], run.about.duration_s),
        requests.prompt_tokens[order],
        requests.cached_tokens[order],
    )


def _gaps(began_s: Floats, duration_s: float) -> Floats:
    if not began_s.size:
        return began_s
    # One that was never sent takes no time.
    places = np.flatnonzero(~np.isnan(began_s))
    gaps = np.zeros(began_s.size)
    if places.size:
        sent = began_s[places]
        gaps[places] = np.diff(sent, append=max(duration_s, float(sent.max())))
        gaps[places[0]] += float(sent[0])
    return gaps


def _block_of(series: _Series) -> int:
    """The longest that any of the latencies asks for; of ranks too, as tails have no variance."""
    return max(
        max(block_length(times), block_length(_ranks(times))) for times in series.latencies.values()
    )


def _ranks(values: Floats) -> Floats:
    known = values[~np.isnan(values)]
    ranks = np.empty(known.size)
    ranks[np.argsort(known, kind="stable")] = np.arange(known.size)
    return ranks


@dataclass(frozen=True, slots=True, eq=False)
class _Figure:
    name: str
    unit: str
    lower_is_better: bool
    values: tuple[float | None, float | None]
    samples: tuple[Floats, Floats] | None


def _figures(
    series: tuple[_Series, _Series], draws: tuple[Draws, Draws] | None
) -> Sequence[_Figure]:
    figures = [each for name in _LATENCIES for each in _latency(name, series, draws)]
    rates = [
        ("throughput", "requests/s", [each.done for each in series]),
        ("answer tokens", "tokens/s", [each.answer_tokens for each in series]),
    ]
    if series[0].held is not None and series[1].held is not None:
        rates.append(("goodput", "requests/s", [series[0].held, series[1].held]))
    gaps = [each.gaps_s for each in series]
    figures += [_quotient(name, unit, above, gaps, draws) for name, unit, above in rates]
    known = [np.isnan(s.cached_tokens) | np.isnan(s.prompt_tokens) for s in series]
    cached = [np.where(gone, 0.0, s.cached_tokens) for gone, s in zip(known, series, strict=True)]
    prompt = [np.where(gone, 0.0, s.prompt_tokens) for gone, s in zip(known, series, strict=True)]
    return [*figures, _quotient("hit rate", "share", cached, prompt, draws)]


def _latency(
    name: str, series: tuple[_Series, _Series], draws: tuple[Draws, Draws] | None
) -> list[_Figure]:
    times = [each.latencies[name] for each in series]
    known = [each[~np.isnan(each)] for each in times]
    values: dict[str, list[float | None]] = {
        "mean": [float(each.mean()) if each.size else None for each in known]
    }
    for share in _SHARES:
        label = f"p{round(100 * share)}"
        values[label] = [float(np.quantile(k, share)) if k.size else None for k in known]
    samples: dict[str, list[Floats]] = {}
    if draws is not None:
        samples["mean"] = [d.means(t) for d, t in zip(draws, times, strict=True)]
        drawn = [d.quantiles(t, _SHARES) for d, t in zip(draws, times, strict=True)]
        for place, label in enumerate(list(values)[1:]):
            samples[label] = [each[place] for each in drawn]
    return [
        _Figure(
            f"{name} {label}",
            "s",
            True,
            (a, b),
            (samples[label][0], samples[label][1]) if draws is not None else None,
        )
        for label, (a, b) in values.items()
    ]


def _quotient(
    name: str,
    unit: str,
    above: Sequence[Floats],
    below: Sequence[Floats],
    draws: tuple[Draws, Draws] | None,
) -> _Figure:
    """A rate is a quotient of sums in every sample, of requests and of the time they take."""
    values = [
        float(x.sum() / y.sum()) if y.sum() > 0 else None for x, y in zip(above, below, strict=True)
    ]
    samples = None
    if draws is not None:
        first, second = (
            ratio(d.sums(x), d.sums(y)) for d, x, y in zip(draws, above, below, strict=True)
        )
        samples = (first, second)
    return _Figure(name, unit, False, (values[0], values[1]), samples)


def _rows(
    figures: Sequence[_Figure], draws: tuple[Draws, Draws] | None, level: float
) -> Sequence[Row]:
    rows = []
    for each in figures:
        a, b = each.values
        found = None
        if draws is not None and each.samples is not None:
            quotients = ratio(each.samples[1], each.samples[0])
            found = interval(quotients, min(d.blocks for d in draws), level)
        low, high = (None, None) if found is None else found
        change = b / a if a and b is not None else None
        rows.append(Row(each.name, each.unit, each.lower_is_better, a, b, change, low, high))
    return rows


def differences(a: RunRecord, b: RunRecord) -> list[tuple[str, Any, Any]]:
    """What of the circumstances is not the same: dotted name, value in A, value in B."""
    left, right = flat_about(a), flat_about(b)
    return [
        (name, left.get(name), right.get(name))
        for name in dict.fromkeys((*left, *right))
        if left.get(name) != right.get(name)
    ]


def flat_about(run: RunRecord) -> dict[str, Any]:
    """Circumstances of a run by dotted name."""
    about = run.about
    parts: dict[str, Any] = {name: getattr(about, name) for name in _TOLD_APART}
    parts["kind"] = about.kind.value
    if about.targets is not None:
        parts["targets"] = {"ttft_s": about.targets.ttft_s, "itl_s": about.targets.itl_s}
    return flat(parts)


def flat(found: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves of a tree of mappings by dotted name."""
    leaves: dict[str, Any] = {}
    for name, value in found.items():
        if isinstance(value, dict) and value:
            leaves |= flat(value, f"{prefix}{name}.")
        else:
            leaves[f"{prefix}{name}"] = value
    return leaves


def _notes(a: RunRecord, b: RunRecord, targets: Targets | None) -> list[str]:
    notes = []
    if a.about.mode is not b.about.mode:
        notes.append(
            f"A was loaded in mode {a.about.mode.value} and B in mode {b.about.mode.value}: their "
            "times do not mean the same."
        )
    if LoadMode.CLOSED in (a.about.mode, b.about.mode):
        notes.append("In a closed loop the slower run is asked for less: compare rates first.")
    if a.about.kind is not b.about.kind:
        notes.append("One of the runs was simulated, the other measured.")
    if targets is None and a.about.targets != b.about.targets:
        notes.append("The targets differ, so no goodput is compared; give --targets.")
    shares = [run.requests.done.mean() if len(run.requests) else 0.0 for run in (a, b)]
    if abs(shares[0] - shares[1]) > 0.01:
        notes.append(
            f"{shares[0]:.1%} of A's requests and {shares[1]:.1%} of B's have a complete answer: "
            "latencies are of these alone, and who refuses more looks faster."
        )
    for letter, run in zip("AB", (a, b), strict=True):
        notes += [f"{letter}: {text}" for text in run.about.warnings]
        if run.about.interrupted:
            notes.append(f"{letter} was interrupted: it is a part of a run.")
        if hit_rate(run.requests) is None:
            notes.append(f"{letter} does not tell cached tokens.")
    return notes
