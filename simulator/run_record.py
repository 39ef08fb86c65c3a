"""The record of a simulated run, in the form of measured ones."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from simulator.run_columns import RunColumns
    from simulator.settings import SimSettings
    from simulator.step_times import StepTimes


def run_record(
    settings: SimSettings,
    times: StepTimes,
    trace: str,
    load: Mapping[str, Any],
    columns: RunColumns,
) -> dict[str, Any]:
    """About, summary, and a column of each figure of the requests; what JSON can hold.

    Nothing in it depends on when or where it was simulated: equal runs have equal records.
    """
    summary = dict(columns.summary())
    return {
        "kvferry_run": 1,
        "about": {
            "name": f"simulated {trace}",
            "kind": "simulated",
            "started": "1970-01-01T00:00:00+00:00",
            "duration_s": summary["duration_s"],
            "dataset": {"name": trace},
            "load": dict(load),
            "endpoint": "grpc",
            "seed": settings.seed,
            "targets": None,
            "config": {"cluster": _plain(settings), "times": _plain(times)},
            "versions": {},
            "machine": {},
        },
        "summary": summary,
        "requests": columns.record(times.kv_bytes_per_token),
    }


def _plain(record: SimSettings | StepTimes) -> dict[str, Any]:
    def value_of(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: value_of(each) for name, each in value.items()}
        return value.value if isinstance(value, Enum) else value

    return {name: value_of(value) for name, value in dataclasses.asdict(record).items()}
