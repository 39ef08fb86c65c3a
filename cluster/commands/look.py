"""`status` and `audit`: what a running cluster says of itself."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from cluster import console
from cluster.client import CallFailed
from cluster.commands.flags import add_address, add_command, add_interval, client_of, interval_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

_CLEAR = "\x1b[H\x1b[2J"


def add(commands: Any) -> None:
    """Add the commands of this file."""
    status = add_command(commands, "status", _status, "show the workers and their accounts")
    status.add_argument("--counters", action="store_true", help="show what each worker counted")
    status.add_argument("--json", action="store_true", help="one line of JSON for each look")
    text = "look again and again, until Ctrl-C; what is not answered is told"
    status.add_argument("--watch", action="store_true", help=text)
    add_interval(status)
    text = "check every account of KV on the running workers"
    audit = add_command(commands, "audit", _audit, text)
    audit.add_argument("worker", nargs="?", default="", help="default: all of them")
    for command in (status, audit):
        add_address(command)


def _status(arguments: argparse.Namespace) -> None:
    interval_s = interval_of(arguments)
    with client_of(arguments) as client:

        def look() -> str:
            return console.status(client, show_counters=arguments.counters, as_json=arguments.json)

        if arguments.watch:
            watch(look, interval_s, time.sleep, clears=sys.stdout.isatty() and not arguments.json)
        else:
            print(look())  # noqa: T201


def watch(
    look: Callable[[], str], interval_s: float, pause: Callable[[float], None], *, clears: bool
) -> None:
    """Print what there is to see, each `interval_s`, until interrupted.

    `clears`: each look takes the place of the one before. Who does not answer may do so later.
    """
    try:
        while True:
            try:
                print(f"{_CLEAR * clears}{look()}", flush=True)  # noqa: T201
            except CallFailed as error:
                print(error, file=sys.stderr, flush=True)  # noqa: T201
            pause(interval_s)
    except KeyboardInterrupt:
        return


def _audit(arguments: argparse.Namespace) -> None:
    with client_of(arguments) as client:
        console.audit(client, arguments.worker)
