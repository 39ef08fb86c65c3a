"""What clients and nodes saw of one run, put together; what it is worth is said with it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.record import LoadMode, RecordError, Requests, requests_of_columns
from bench.summary import summarized

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.record import About, RunRecord

LATE_S = 0.02
"""A sender later than this at p99 of its requests was too slow for its plan. A busy machine's
scheduler alone costs some milliseconds."""


def requests_of_rows(rows: Sequence[dict[str, Any]], mode: LoadMode, warmup_s: float) -> Requests:
    """By index; without the warm-up, after whose end the times count."""
    began = "sent_s" if mode is LoadMode.CLOSED else "scheduled_s"
    kept = [row for row in rows if row[began] is not None and row[began] >= warmup_s]
    kept.sort(key=lambda row: row["index"])
    columns = {column.name: [row[column.name] for row in kept] for column in fields(Requests)}
    for name in ("scheduled_s", "sent_s", "first_token_s", "end_s"):
        columns[name] = [None if at_s is None else at_s - warmup_s for at_s in columns[name]]
    return requests_of_columns(columns)


def duration_s(requests: Requests) -> float:
    """Until the last end."""
    ends = requests.end_s[~np.isnan(requests.end_s)]
    return float(ends.max()) if ends.size else 0.0


def late_clients(requests: Requests, clients: Sequence[int]) -> list[str]:
    """A warning for each client [requests] that missed its plan."""
    found = []
    numbers = np.array(clients, dtype=np.int64)
    for client in np.unique(numbers).tolist():
        late_s = requests.late_s[numbers == client]
        late_s = late_s[~np.isnan(late_s)]
        if late_s.size and (p99_s := float(np.quantile(late_s, 0.99))) > LATE_S:
            found.append(
                f"client {client} sent late: p99 {1000 * p99_s:.0f} ms, at most "
                f"{1000 * late_s.max():.0f} ms; it was a bottleneck, use more clients"
            )
    return found


def merged(records: Sequence[RunRecord]) -> RunRecord:
    """The parts that nodes sent of one run, which began at one moment. Raises `RecordError`."""
    first = records[0].about
    for record in records[1:]:
        for name in ("dataset", "load", "endpoint", "seed"):
            if getattr(record.about, name) != getattr(first, name):
                raise RecordError(f"about.{name}", "differs: these are no parts of one run")
    requests = _joined([record.requests for record in records])
    return summarized(_about(records, duration_s(requests)), requests)


def _joined(parts: Sequence[Requests]) -> Requests:
    order = np.argsort(np.concatenate([part.index for part in parts]), kind="stable")
    joined: dict[str, Any] = {}
    for column in fields(Requests):
        values = [getattr(part, column.name) for part in parts]
        if isinstance(values[0], tuple):
            flat = [entry for value in values for entry in value]
            joined[column.name] = tuple(flat[place] for place in order.tolist())
        else:
            joined[column.name] = np.concatenate(values)[order]
    requests = Requests(**joined)
    repeated = requests.index[:-1][np.diff(requests.index) == 0]
    if repeated.size:
        raise RecordError("requests.index", f"{repeated[0]} is in two of the parts")
    return requests


def _about(records: Sequence[RunRecord], lasted_s: float) -> About:
    hosts = [record.about.machine for record in records]
    return replace(
        records[0].about,
        started=min(record.about.started for record in records),
        duration_s=lasted_s,
        machine={"nodes": hosts},
        interrupted=any(record.about.interrupted for record in records),
        warnings=tuple(text for record in records for text in record.about.warnings),
    )
