"""`status` and `audit`: what a running cluster says of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cluster import console
from cluster.commands.flags import add_address, add_command, client_of

if TYPE_CHECKING:
    import argparse


def add(commands: Any) -> None:
    """Add the commands of this file."""
    status = add_command(commands, "status", _status, "show the workers and their accounts")
    status.add_argument("--counters", action="store_true", help="show what each worker counted")
    text = "check every account of KV on the running workers"
    audit = add_command(commands, "audit", _audit, text)
    audit.add_argument("worker", nargs="?", default="", help="default: all of them")
    for command in (status, audit):
        add_address(command)


def _status(arguments: argparse.Namespace) -> None:
    with client_of(arguments) as client:
        console.status(client, show_counters=arguments.counters)


def _audit(arguments: argparse.Namespace) -> None:
    with client_of(arguments) as client:
        console.audit(client, arguments.worker)
