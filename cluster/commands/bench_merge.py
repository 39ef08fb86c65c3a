"""`bench merge`: one record of the parts that several nodes sent."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.parts import merged
from cluster.commands.flags import add_command
from cluster.commands.run_records import read_from, write_to

if TYPE_CHECKING:
    import argparse


def add(commands: Any) -> None:
    """Add the command of this file."""
    text = "put the records of `bench run --part K/N` together"
    merge = add_command(commands, "merge", _merge, text)
    merge.add_argument("parts", nargs="+", type=Path, metavar="RECORD")
    merge.add_argument("--out", type=Path, required=True, metavar="FILE")


def _merge(arguments: argparse.Namespace) -> None:
    write_to(merged([read_from(path) for path in arguments.parts]), arguments.out)
