"""`top`: workers, accounts and latencies, live in the terminal."""

from __future__ import annotations

import contextlib
import select
import shutil
import sys
import termios
import tty
from typing import TYPE_CHECKING, Any

from cluster.client import CallFailed
from cluster.commands.flags import add_address, add_command, add_interval, client_of, interval_of
from cluster.top_view import top_lines
from kvferry.errors import InvalidInput

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from cluster.client import Client

_REQUESTS = 50
"""Whose latencies are told."""
_ENTER = "\x1b[?1049h\x1b[?25l"
_LEAVE = "\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"


def add(commands: Any) -> None:
    """Add the command of this file."""
    top = add_command(commands, "top", _top, "workers, load and latencies, live; q quits")
    top.add_argument("--once", action="store_true", help="print it once, for scripts")
    add_interval(top)
    add_address(top)


def _top(arguments: argparse.Namespace) -> None:
    interval_s = interval_of(arguments)
    with client_of(arguments) as client:
        if arguments.once:
            print("\n".join(_lines(client)))  # noqa: T201
        elif not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise InvalidInput("top", "is not at a terminal; give --once")
        else:
            _follow(client, interval_s)


def _lines(client: Client) -> list[str]:
    """Raises `CallFailed`."""
    return top_lines(client.cluster_status(), client.traces("", _REQUESTS))


def _follow(client: Client, interval_s: float) -> None:
    """Until q is pressed. What is shown stays while the router does not answer."""
    shown: list[str] = []
    with _whole_screen():
        while True:
            try:
                shown, trouble = _lines(client), "q quits"
            except CallFailed as error:
                trouble = f"what is shown may be old: {error}"
            size = shutil.get_terminal_size()
            sys.stdout.write(screen([*shown, "", trouble], size.columns, size.lines))
            sys.stdout.flush()
            ready, _, _ = select.select([sys.stdin], [], [], interval_s)
            if ready and sys.stdin.read(1) in ("q", "Q", ""):
                return


def screen(lines: list[str], columns: int, rows: int) -> str:
    """What makes a terminal of this size show these lines, and nothing of before."""
    cut = [f"{line[:columns]}{_CLEAR_LINE}" for line in lines[:rows]]
    return _HOME + "\r\n".join(cut) + _CLEAR_REST


@contextlib.contextmanager
def _whole_screen() -> Iterator[None]:
    """Keys come at once, and the terminal is afterwards as it was."""
    before = termios.tcgetattr(sys.stdin)
    sys.stdout.write(_ENTER)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
