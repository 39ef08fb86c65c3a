"""`trace`: where the time of a request went."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cluster.commands.flags import add_address, add_command, client_of
from cluster.gantt import gantt, traces_table
from kvferry.errors import InvalidInput

if TYPE_CHECKING:
    import argparse

_RECENT = 20


def add(commands: Any) -> None:
    """Add the commands of this file."""
    trace = add_command(commands, "trace", _trace, "show where the time of a request went")
    trace.add_argument("request", nargs="?", default="", help="a request id or a trace id")
    trace.add_argument(
        "--recent",
        type=int,
        nargs="?",
        const=_RECENT,
        metavar="COUNT",
        help=f"list the requests in flight and the last ones instead; default: {_RECENT}",
    )
    add_address(trace)


def _trace(arguments: argparse.Namespace) -> None:
    if bool(arguments.request) == (arguments.recent is not None):
        raise InvalidInput("request", "name one, or list them with --recent")
    with client_of(arguments) as client:
        answer = client.traces(arguments.request, arguments.recent or _RECENT)
    if arguments.request:
        print("\n\n".join(map(gantt, answer.requests)))  # noqa: T201
    else:
        print(traces_table(list(answer.requests)))  # noqa: T201
