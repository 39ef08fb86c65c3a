"""The record of one run: what was asked for, when what came, and under which circumstances.

    record = read_record(path)
    record.requests.ttft_s(record.about.load)

One JSON file, the same for a run that was measured and one that was simulated. Requests are
columns: one entry per request, in the order of `index`. What never came or is not known is null in
the file and NaN or None here.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from kvferry.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

FORM = 1
"""Of the file; a reader of another form must not guess."""
_FORM_KEY = "kvferry_run"

Floats: TypeAlias = "NDArray[np.float64]"
Texts: TypeAlias = "tuple[str | None, ...]"


class RecordError(InvalidInput):
    """The file is no record of a run; `field` is the dotted name of what is wrong in it."""


class Outcome(Enum):
    """How a request ended."""

    DONE = "done"
    REFUSED = "refused"
    """By the server's limits or rules, before it answered anything."""
    FAILED = "failed"
    CANCELLED = "cancelled"
    """By the client: its deadline passed, or the run was ended."""


class RunKind(Enum):
    """Where the times come from."""

    MEASURED = "measured"
    SIMULATED = "simulated"


class LoadMode(Enum):
    """What decides when a request is sent."""

    OPEN = "open"
    """A plan of times, whatever the answers do."""
    CLOSED = "closed"
    """The end of another request."""
    REPLAY = "replay"
    """The times of a trace, and within a session the end of the answer before."""


@dataclass(frozen=True, slots=True)
class Targets:
    """What a user accepts; both at once."""

    ttft_s: float
    itl_s: float
    """Of the mean gap between two tokens of one answer."""


@dataclass(frozen=True, slots=True)
class About:
    """Of the whole run."""

    name: str
    kind: RunKind
    started: str
    """ISO 8601, UTC."""
    duration_s: float
    dataset: Mapping[str, Any]
    """`name` at least."""
    load: Mapping[str, Any]
    """`mode` (of `LoadMode`) at least."""
    endpoint: str
    """"grpc" or "http"; of a simulation "grpc"."""
    seed: int
    targets: Targets | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    interrupted: bool = False
    """Ended before its plan was: what the record has is a part of the run."""
    warnings: tuple[str, ...] = ()
    """What makes the figures less than they seem, such as a sender that was late."""

    @property
    def mode(self) -> LoadMode:
        """Of the load."""
        return LoadMode(self.load["mode"])


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """Columns [requests]; times in seconds since the start of the run, NaN for what never came.

    Counts are float64 as well: exact to 2^53, and NaN where they are not known.
    """

    index: NDArray[np.int64]
    session: NDArray[np.int64]
    scheduled_s: Floats
    """When the plan had it sent; in a closed loop, when its turn came."""
    sent_s: Floats
    first_token_s: Floats
    end_s: Floats
    prompt_tokens: Floats
    cached_tokens: Floats
    """Of the prompt, what nobody had to compute."""
    answer_tokens: Floats
    moved_bytes: Floats
    moved_tokens: Floats
    prefill_worker: Texts
    decode_worker: Texts
    outcome: tuple[Outcome, ...]
    error: Texts
    """What the server called it, such as "RESOURCE_EXHAUSTED" or "429"."""
    attempts: Floats
    itl_mean_s: Floats
    """(last token - first token) / (tokens - 1)."""
    itl_p99_s: Floats
    itl_max_s: Floats

    def __post_init__(self) -> None:
        """All columns have one length."""
        for column in fields(self):
            length = len(getattr(self, column.name))
            if length != len(self.index):
                problem = f"has {length} entries where index has {len(self.index)}"
                raise RecordError(f"requests.{column.name}", problem)

    def __len__(self) -> int:
        return int(self.index.size)

    @property
    def done(self) -> NDArray[np.bool_]:
        """[requests]: which ones have their whole answer."""
        return np.array([outcome is Outcome.DONE for outcome in self.outcome], dtype=np.bool_)

    def began_s(self, mode: LoadMode) -> Floats:
        """From when a request's waiting counts. Where a plan has the times, from the plan on: a
        sender that is late must not hide what its users wait for."""
        return self.sent_s if mode is LoadMode.CLOSED else self.scheduled_s

    def ttft_s(self, mode: LoadMode) -> Floats:
        """[requests]: time to the first token."""
        return self.first_token_s - self.began_s(mode)

    def e2e_s(self, mode: LoadMode) -> Floats:
        """[requests]: time to the end of the answer."""
        return self.end_s - self.began_s(mode)

    @property
    def late_s(self) -> Floats:
        """[requests]: by how much the sender missed its plan."""
        return self.sent_s - self.scheduled_s


@dataclass(frozen=True, slots=True, eq=False)
class RunRecord:
    """What one run leaves. `bench.summary.summarized` makes one with its summary."""

    about: About
    requests: Requests
    summary: Mapping[str, Any] = field(default_factory=dict)


def write_record(record: RunRecord, path: Path) -> None:
    """Write it whole or not at all. Raises `OSError`."""
    text = json.dumps(_to_json(record), allow_nan=False, indent=None, separators=(",", ":"))
    # Beside it, so that the replacement is one step of one file system.
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_record(path: Path) -> RunRecord:
    """Raises `RecordError` naming the field that is wrong, and `OSError`."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RecordError(str(path), f"is no JSON: {error}") from error
    return record_of_json(found)


def record_of_json(found: Any) -> RunRecord:
    """What a file holds. Raises `RecordError`."""
    if not isinstance(found, dict) or _FORM_KEY not in found:
        raise RecordError(_FORM_KEY, "is missing: this is no record of a run")
    if found[_FORM_KEY] != FORM:
        raise RecordError(_FORM_KEY, f"is {found[_FORM_KEY]!r}; only form {FORM} can be read")
    about = _about_of(_mapping(found, "about"))
    requests = requests_of_columns(_mapping(found, "requests"))
    return RunRecord(about, requests, _mapping(found, "summary"))


def requests_of_columns(columns: Mapping[str, Sequence[Any]]) -> Requests:
    """Columns of plain values, None for what is not known. Raises `RecordError`."""
    made: dict[str, Any] = {}
    for column in fields(Requests):
        name = column.name
        values = columns.get(name)
        if not isinstance(values, (list, tuple)):
            raise RecordError(f"requests.{name}", "is missing or no list")
        made[name] = _COLUMNS.get(name, _floats)(name, values)
    return Requests(**made)


def _to_json(record: RunRecord) -> dict[str, Any]:
    about = {entry.name: getattr(record.about, entry.name) for entry in fields(About)}
    about["kind"] = record.about.kind.value
    about["warnings"] = list(record.about.warnings)
    if record.about.targets is not None:
        about["targets"] = {
            "ttft_s": record.about.targets.ttft_s,
            "itl_s": record.about.targets.itl_s,
        }
    columns = {
        column.name: _plain(getattr(record.requests, column.name)) for column in fields(Requests)
    }
    return {
        _FORM_KEY: FORM,
        "about": about,
        "summary": dict(record.summary),
        "requests": columns,
    }


def _plain(column: Any) -> list[Any]:
    if isinstance(column, tuple):
        return [entry.value if isinstance(entry, Enum) else entry for entry in column]
    return [_number(value) for value in column.tolist()]


def _number(value: float) -> float | int | None:
    if math.isnan(value):
        return None
    return int(value) if float(value).is_integer() else round(value, 6)


def _floats(name: str, values: Sequence[Any]) -> Floats:
    # A look at the types alone is enough for nearly every column, and a million are read at once.
    if set(map(type, values)) <= {float, int, type(None)}:
        found = np.array(values, dtype=np.float64)
        # NaN is what None became; a NaN of the file is refused below.
        if np.isnan(found).sum() == values.count(None) and not np.isinf(found).any():
            return found
    for number, value in enumerate(values):
        if value is None:
            continue
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            raise RecordError(f"requests.{name}[{number}]", f"is {value!r}, no number")
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


def _integers(name: str, values: Sequence[Any]) -> NDArray[np.int64]:
    if set(map(type, values)) == {int}:
        return np.array(values, dtype=np.int64)
    for number, value in enumerate(values):
        if not isinstance(value, int) or isinstance(value, bool):
            raise RecordError(f"requests.{name}[{number}]", f"is {value!r}, no whole number")
    return np.array(values, dtype=np.int64)


def _texts(name: str, values: Sequence[Any]) -> Texts:
    if set(map(type, values)) <= {str, type(None)}:
        return tuple(values)
    for number, value in enumerate(values):
        if value is not None and not isinstance(value, str):
            raise RecordError(f"requests.{name}[{number}]", f"is {value!r}, no text")
    return tuple(values)


def _outcomes(name: str, values: Sequence[Any]) -> tuple[Outcome, ...]:
    names = {outcome.value: outcome for outcome in Outcome}
    for number, value in enumerate(values):
        if value not in names:
            problem = f"is {value!r}; must be one of {', '.join(names)}"
            raise RecordError(f"requests.{name}[{number}]", problem)
    return tuple(names[value] for value in values)


_COLUMNS: Mapping[str, Any] = {
    "index": _integers,
    "session": _integers,
    "prefill_worker": _texts,
    "decode_worker": _texts,
    "error": _texts,
    "outcome": _outcomes,
}


def _about_of(found: Mapping[str, Any]) -> About:
    load, dataset = _mapping(found, "load", "about."), _mapping(found, "dataset", "about.")
    _member(LoadMode, "about.load.mode", load.get("mode"))
    return About(
        name=_typed(found, "name", str),
        kind=RunKind(_member(RunKind, "about.kind", found.get("kind"))),
        started=_typed(found, "started", str),
        duration_s=float(_typed(found, "duration_s", (int, float))),
        dataset=dataset,
        load=load,
        endpoint=_typed(found, "endpoint", str),
        seed=_typed(found, "seed", int),
        targets=_targets_of(found.get("targets")),
        config=_mapping(found, "config", "about."),
        versions=_mapping(found, "versions", "about."),
        machine=_mapping(found, "machine", "about."),
        interrupted=found.get("interrupted", False) is True,
        warnings=tuple(str(text) for text in found.get("warnings", ())),
    )


def _targets_of(found: Any) -> Targets | None:
    if found is None:
        return None
    if not isinstance(found, dict):
        raise RecordError("about.targets", f"is {found!r}; must be ttft_s and itl_s, or null")
    values = {}
    for name in ("ttft_s", "itl_s"):
        value = _typed(found, name, (int, float), "about.targets.")
        if not value > 0:
            raise RecordError(f"about.targets.{name}", f"is {value}; must be above 0")
        values[name] = float(value)
    return Targets(**values)


def _mapping(found: Mapping[str, Any], name: str, prefix: str = "") -> Mapping[str, Any]:
    value = found.get(name)
    if not isinstance(value, dict):
        raise RecordError(f"{prefix}{name}", "is missing or no object")
    return value


def _typed(
    found: Mapping[str, Any], name: str, kind: type | tuple[type, ...], prefix: str = "about."
) -> Any:
    value = found.get(name)
    if isinstance(value, bool) or not isinstance(value, kind):
        raise RecordError(f"{prefix}{name}", f"is {value!r}")
    return value


def _member(kind: type[Enum], name: str, value: Any) -> str:
    values = [member.value for member in kind]
    if value not in values:
        raise RecordError(name, f"is {value!r}; must be one of {', '.join(values)}")
    return str(value)
