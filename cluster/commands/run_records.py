"""Run records and targets, as the commands name them that write, read, judge or make runs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from bench.record import RecordError, Targets, read_record, write_record
from kvferry.errors import InvalidInput

if TYPE_CHECKING:
    from pathlib import Path

    from bench.record import RunRecord

_UNITS = {"ms": 0.001, "s": 1.0}


def add_targets(command: Any, text: str) -> None:
    """The flag that `targets_of` reads."""
    command.add_argument("--targets", default="", metavar="ttft=2s,itl=100ms", help=text)


def targets_of(text: str) -> Targets | None:
    """Of "ttft=2s,itl=100ms". Raises `InvalidInput`."""
    if not text:
        return None
    found: dict[str, float] = {}
    for entry in text.split(","):
        name, _, value = entry.strip().partition("=")
        found[name] = _seconds(value)
    if set(found) != {"ttft", "itl"}:
        raise InvalidInput("targets", f"is {text!r}; must name ttft and itl")
    return Targets(found["ttft"], found["itl"])


def _seconds(text: str) -> float:
    for unit, factor in _UNITS.items():
        if text.endswith(unit):
            try:
                value_s = factor * float(text.removesuffix(unit))
            except ValueError:
                break
            if 0 < value_s < math.inf:
                return value_s
    raise InvalidInput("targets", f"has {text!r}; must be a time such as 2s or 100ms")


def read_from(path: Path) -> RunRecord:
    """Raises `InvalidInput` naming the file, and the field that is wrong in it."""
    try:
        return read_record(path)
    except OSError as error:
        raise InvalidInput(str(path), f"cannot be read: {error.strerror}") from error
    except RecordError as error:
        raise InvalidInput(str(path), str(error)) from error


def write_to(record: RunRecord, path: Path) -> None:
    """Raises `InvalidInput` naming the flag."""
    try:
        write_record(record, path)
    except OSError as error:
        raise InvalidInput("out", f"cannot write {path}: {error.strerror}") from error
