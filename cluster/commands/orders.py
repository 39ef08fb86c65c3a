"""`add-worker`, `scale`, `switch-role`, `drain`: who shall be in a running cluster.

`set-role` and `remove-worker` are older names of the last two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cluster.commands.flags import add_address, add_command, client_of
from kvferry.limits import DRAIN_S
from kvferry.membership import Role

if TYPE_CHECKING:
    import argparse


def add(commands: Any) -> None:
    """Add the commands of this file."""
    more = add_command(commands, "add-worker", _add_worker, "start one more worker")
    scale = add_command(commands, "scale", _scale, "have so many workers of a role")
    text = "use a worker for something else from now on"
    changes = [
        add_command(commands, "switch-role", _set_role, text),
        add_command(commands, "set-role", _set_role, f"{text}; the same as switch-role"),
    ]
    text = "give a worker nothing new, and end it when it has nothing left to do"
    removes = [
        add_command(commands, "drain", _remove_worker, text),
        add_command(commands, "remove-worker", _remove_worker, f"{text}; the same as drain"),
    ]
    for command in (*changes, *removes):
        command.add_argument("worker")
    for command in (more, scale, *changes):
        command.add_argument("role", choices=[role.value for role in Role])
    scale.add_argument("count", type=int)
    text = "how long it may take to do what it has; default: %(default)s"
    for command in (scale, *removes):
        command.add_argument("--drain-s", type=float, default=DRAIN_S, help=text)
    for command in (more, scale, *changes, *removes):
        add_address(command)


def _add_worker(arguments: argparse.Namespace) -> None:
    with client_of(arguments) as client:
        name = client.add_worker(arguments.role)
    print(f"{name} is being started; `kvferry status` shows it when it serves")  # noqa: T201


def _scale(arguments: argparse.Namespace) -> None:
    with client_of(arguments) as client:
        outcome = client.scale(arguments.role, arguments.count, arguments.drain_s)
    for name in outcome.added:
        print(f"{name} is being started")  # noqa: T201
    for name in outcome.draining:
        print(f"{name} drains, and leaves")  # noqa: T201
    if not outcome.added and not outcome.draining:
        print(f"there are {arguments.count} for {arguments.role} already")  # noqa: T201


def _set_role(arguments: argparse.Namespace) -> None:
    with client_of(arguments) as client:
        client.set_role(arguments.worker, arguments.role)
    print(f"{arguments.worker} is used for {arguments.role} from now on")  # noqa: T201


def _remove_worker(arguments: argparse.Namespace) -> None:
    with client_of(arguments) as client:
        drained = client.remove_worker(arguments.worker, arguments.drain_s)
    rest = "it had nothing left to do" if drained else "what it had goes on at other workers"
    print(f"{arguments.worker} has left the cluster; {rest}")  # noqa: T201
