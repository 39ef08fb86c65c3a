"""`bench merge`: one record of the parts that several nodes sent."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.parts import merged
from bench.record import read_record, write_record
from cluster.commands.flags import add_command
from kvferry.errors import InvalidInput

if TYPE_CHECKING:
    import argparse

    from bench.record import RunRecord


def add(commands: Any) -> None:
    """Add the command of this file."""
    text = "put the records of `bench run --part K/N` together"
    merge = add_command(commands, "merge", _merge, text)
    merge.add_argument("parts", nargs="+", type=Path, metavar="RECORD")
    merge.add_argument("--out", type=Path, required=True, metavar="FILE")


def _merge(arguments: argparse.Namespace) -> None:
    write_to(merged([read_from(path) for path in arguments.parts]), arguments.out)


def read_from(path: Path) -> RunRecord:
    """Raises `InvalidInput` naming the file or the field."""
    try:
        return read_record(path)
    except OSError as error:
        raise InvalidInput("record", f"cannot read {path}: {error.strerror}") from error


def write_to(record: RunRecord, path: Path) -> None:
    """Raises `InvalidInput` naming the flag."""
    try:
        write_record(record, path)
    except OSError as error:
        raise InvalidInput("out", f"cannot write {path}: {error.strerror}") from error
