"""`bench`: puts load on a server and says what came of it; a module for each of its commands."""

from __future__ import annotations

from typing import Any

from cluster.commands import bench_merge, bench_profile, bench_report, bench_run

_COMMANDS = (bench_run, bench_merge, bench_report, bench_profile)
"""In the order in which the help shows them."""


def add(commands: Any) -> None:
    """Add `bench` and what is below it."""
    text = "put load on a cluster, or on any server of OpenAI's API, and look at what came of it"
    group = commands.add_parser("bench", help=text, description=text, allow_abbrev=False)
    below = group.add_subparsers(dest="bench_command", required=True, metavar="COMMAND")
    for module in _COMMANDS:
        module.add(below)
