"""The record of a simulated run, in the form of measured ones."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import TYPE_CHECKING, Any

from bench.parts import duration_s
from bench.record import About, RunKind, RunRecord, requests_of_columns
from bench.summary import summarized

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench.record import Targets
    from simulator.run_columns import RunColumns
    from simulator.settings import SimSettings, WorkerDeath
    from simulator.step_times import StepTimes

_STARTED = "1970-01-01T00:00:00+00:00"
"""Simulated time has no date."""


def run_record(
    settings: SimSettings,
    times: StepTimes,
    trace: str,
    load: Mapping[str, Any],
    columns: RunColumns,
    deaths: Sequence[WorkerDeath] = (),
    targets: Targets | None = None,
) -> RunRecord:
    """Nothing in it depends on when or where it was simulated: equal runs have equal records."""
    requests = requests_of_columns(columns.record(times.kv_bytes_per_token))
    about = About(
        name=f"simulated {trace}",
        kind=RunKind.SIMULATED,
        started=_STARTED,
        duration_s=duration_s(requests),
        dataset={"name": trace},
        load=dict(load),
        endpoint="grpc",
        seed=settings.seed,
        targets=targets,
        config={
            "cluster": _plain(settings),
            "times": _plain(times),
            "deaths": [_plain(death) for death in deaths],
        },
    )
    return summarized(about, requests)


def _plain(record: SimSettings | StepTimes | WorkerDeath) -> dict[str, Any]:
    def value_of(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: value_of(each) for name, each in value.items()}
        return value.value if isinstance(value, Enum) else value

    return {name: value_of(value) for name, value in dataclasses.asdict(record).items()}
