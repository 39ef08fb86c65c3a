"""The runs of a report: each with its name in legends and the columns that figures are made of."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bench.compare import flat
from bench.summary import summarized

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from bench.record import Floats, RunRecord


@dataclass(frozen=True, slots=True, eq=False)
class RunView:
    """One run; columns are [requests], NaN where nothing is known."""

    place: int
    label: str
    record: RunRecord
    began_s: Floats
    ttft_s: Floats
    """Of complete answers, as the two below."""
    itl_s: Floats
    e2e_s: Floats

    @property
    def duration_s(self) -> float:
        """Of the run, above 0."""
        return max(self.record.about.duration_s, 1e-9)

    @property
    def latencies(self) -> Mapping[str, Floats]:
        """By their name."""
        return {"TTFT": self.ttft_s, "ITL": self.itl_s, "E2E": self.e2e_s}


def views(records: Sequence[RunRecord]) -> tuple[RunView, ...]:
    """All runs of a report, each with a label of its own and a summary as of today's rules."""
    return tuple(
        _view(place, label, record)
        for place, (label, record) in enumerate(zip(labels(records), records, strict=True))
    )


def _view(place: int, label: str, record: RunRecord) -> RunView:
    requests, mode = record.requests, record.about.mode
    done = requests.done
    times = (requests.ttft_s(mode), requests.itl_mean_s, requests.e2e_s(mode))
    ttft_s, itl_s, e2e_s = (np.where(done, each, np.nan) for each in times)
    fresh = summarized(record.about, requests)
    return RunView(place, label, fresh, requests.began_s(mode), ttft_s, itl_s, e2e_s)


def labels(records: Sequence[RunRecord]) -> list[str]:
    """Names; where several runs share one, with what was swept, else with their number."""
    names = Counter(record.about.name for record in records)
    swept = swept_name(records)
    found = []
    for record in records:
        label = record.about.name
        value = None if swept is None else swept_value(record, swept)
        if names[label] > 1 and value is not None:
            label = f"{label}, {swept} {value:g}"
        found.append(label)
    again = Counter(found)
    return [
        f"{label} ({place})" if again[label] > 1 else label
        for place, label in enumerate(found, start=1)
    ]


def swept_name(records: Sequence[RunRecord]) -> str | None:
    """The number of load or dataset that differs most often between runs of one name."""
    groups: dict[str, list[Mapping[str, float]]] = {}
    for record in records:
        groups.setdefault(record.about.name, []).append(_numbers(record))
    kinds: Counter[str] = Counter()
    for group in groups.values():
        for name in dict.fromkeys(name for each in group for name in each):
            values = {each[name] for each in group if name in each}
            if len(values) > 1:
                kinds[name] += len(values)
    # Of equals the one that is told first, and of those of the load before those of the dataset.
    return max(kinds, key=lambda name: kinds[name]) if kinds else None


def swept_value(record: RunRecord, name: str) -> float | None:
    """What a run has of it."""
    return _numbers(record).get(name)


def _numbers(record: RunRecord) -> dict[str, float]:
    leaves = {**flat(record.about.load), **flat(record.about.dataset, "dataset ")}
    return {
        name: float(value)
        for name, value in leaves.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def quantile(values: Floats, at: float) -> float:
    """Of what is not NaN; NaN of nothing."""
    known = values[~np.isnan(values)]
    return float(np.quantile(known, at)) if known.size else float("nan")


def per_bin(
    places: Floats, values: Floats, edges: Floats, figure: Callable[[Floats], float]
) -> Floats:
    """[bins]: a figure of the values whose place is in each bin; NaN where there are none."""
    known = ~np.isnan(places) & ~np.isnan(values)
    bin_of = np.searchsorted(edges, places[known], side="right") - 1
    order = np.argsort(bin_of, kind="stable")
    sorted_values, sorted_bins = values[known][order], bin_of[order]
    cuts = np.searchsorted(sorted_bins, np.arange(edges.size))
    parts = [sorted_values[a:b] for a, b in itertools.pairwise(cuts)]
    return np.array([figure(part) if part.size else np.nan for part in parts])
