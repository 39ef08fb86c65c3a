"""Whether the `kvferry` command would take a line of ours."""

from __future__ import annotations

import contextlib
import io
import shlex

from cluster.cli import build_parser


class Refused(Exception):
    """What the command says to the line."""


def check_kvferry_command(line: str) -> None:
    """Parse `[path/]kvferry ...` by the real parser. Raises `Refused`."""
    words = shlex.split(line)
    assert words[0].split("/")[-1] == "kvferry", line
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            build_parser().parse_args(words[1:])
    except SystemExit as error:
        if error.code == 0:
            return  # `--help`
        raise Refused(f"{line}: {said.getvalue().strip()}") from error
