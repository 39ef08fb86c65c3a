"""Files of timing models: what was measured or derived, and how, beside the terms themselves.

    {"kvferry_timing": 1, "about": {"kind": "measured", ...}, "times": {"prompt_step_s": 0.01, ...}}

Terms are those of `step_times.StepTimes`; docs/timing.md says what each of them means and how it is
measured. Presets are such files, for machines of which figures are published.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from enum import Enum
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvferry.errors import InvalidInput
from simulator.step_times import StepTimes

if TYPE_CHECKING:
    from collections.abc import Mapping

_VERSION = 1
_ABOVE_0 = ("bytes_per_s", "kv_bytes_per_token", "layers")
_WHOLE = ("kv_bytes_per_token", "layers")


class TimingKind(Enum):
    """Where terms come from."""

    MEASURED = "measured"
    """By `kvferry bench profile`, on the cluster itself."""
    ROOFLINE = "roofline"
    """Derived from published rates of the hardware and the shape of the model."""


@dataclass(frozen=True, slots=True)
class WorkerTiming:
    """Terms, and what is known of their origin."""

    times: StepTimes
    kind: TimingKind
    about: Mapping[str, Any] = field(default_factory=dict)
    """Whatever JSON can hold: machine, residuals, sources."""

    def text(self) -> str:
        """The file."""
        record = {
            "kvferry_timing": _VERSION,
            "about": {"kind": self.kind.value, **self.about},
            "times": dataclasses.asdict(self.times),
        }
        return json.dumps(record, indent=2) + "\n"


def preset_names() -> tuple[str, ...]:
    """Of the files that come along."""
    files = resources.files("simulator").joinpath("presets").iterdir()
    return tuple(sorted(file.name.removesuffix(".json") for file in files))


def read_timing(name: str) -> WorkerTiming:
    """Of a preset's name, or of a file. Raises `InvalidInput`, naming the term."""
    if name in preset_names():
        file = resources.files("simulator").joinpath("presets", f"{name}.json")
        return parse_timing(file.read_text(encoding="utf-8"), name)
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        known = ", ".join(preset_names())
        raise InvalidInput("timing", f"{name} is neither a file nor one of {known}") from error
    return parse_timing(text, name)


def parse_timing(text: str, where: str) -> WorkerTiming:
    """What `WorkerTiming.text` gave. Terms that are missing are as by default.

    Raises `InvalidInput`, naming the term and `where`.
    """
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidInput("timing", f"{where}: {error}") from error
    if not isinstance(found, dict) or found.get("kvferry_timing") != _VERSION:
        raise InvalidInput("timing", f"{where}: kvferry_timing is not {_VERSION}")
    about, terms = found.get("about"), found.get("times")
    if not isinstance(about, dict):
        raise InvalidInput("about", f"{where}: is missing or no object")
    if not isinstance(terms, dict):
        raise InvalidInput("times", f"{where}: is missing or no object")
    kinds = {kind.value: kind for kind in TimingKind}
    kind = kinds.get(about.get("kind", ""))
    if kind is None:
        raise InvalidInput("about.kind", f"{where}: is none of {', '.join(kinds)}")
    rest = {name: value for name, value in about.items() if name != "kind"}
    return WorkerTiming(_times_of(terms, where), kind, rest)


def _times_of(terms: Mapping[str, Any], where: str) -> StepTimes:
    names = {each.name for each in dataclasses.fields(StepTimes)}
    for name, value in terms.items():
        if name not in names:
            raise InvalidInput(f"times.{name}", f"{where}: is none of {', '.join(sorted(names))}")
        kinds = (int,) if name in _WHOLE else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise InvalidInput(f"times.{name}", f"{where}: is {value!r}")
        if not math.isfinite(value) or value < 0 or (name in _ABOVE_0 and value == 0):
            raise InvalidInput(f"times.{name}", f"{where}: is {value!r}")
    return StepTimes(**terms)
