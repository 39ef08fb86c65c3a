"""`add-worker`, `set-role`, `remove-worker`: who shall be in a running cluster."""

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
    text = "use a worker for something else from now on"
    change = add_command(commands, "set-role", _set_role, text)
    remove = add_command(commands, "remove-worker", _remove_worker, "drain a worker, then end it")
    for command in (change, remove):
        command.add_argument("worker")
    for command in (more, change):
        command.add_argument("role", choices=[role.value for role in Role])
    text = "how long it may take to do what it has; default: %(default)s"
    remove.add_argument("--drain-s", type=float, default=DRAIN_S, help=text)
    for command in (more, change, remove):
        add_address(command)


def _add_worker(arguments: argparse.Namespace) -> None:
    with client_of(arguments) as client:
        name = client.add_worker(arguments.role)
    print(f"{name} is being started; `kvferry status` shows it when it serves")  # noqa: T201


def _set_role(arguments: argparse.Namespace) -> None:
    with client_of(arguments) as client:
        client.set_role(arguments.worker, arguments.role)
    print(f"{arguments.worker} is used for {arguments.role} from now on")  # noqa: T201


def _remove_worker(arguments: argparse.Namespace) -> None:
    with client_of(arguments) as client:
        drained = client.remove_worker(arguments.worker, arguments.drain_s)
    rest = "it had nothing left to do" if drained else "what it had goes on at other workers"
    print(f"{arguments.worker} has left the cluster; {rest}")  # noqa: T201
