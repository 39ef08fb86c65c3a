"""The `kvferry` command.

Exit codes: 0 done (for `serve`: stopped by Ctrl-C or SIGTERM once it served), 1 the cluster or the
server failed or, for `audit`, some ledger is not known to be right, 2 the command line or the
configuration is wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from typing import TYPE_CHECKING

from cluster import console
from cluster.client import CallFailed
from cluster.commands import (
    ask,
    bench,
    local,
    look,
    nodes,
    orders,
    plan,
    rollout,
    simulate,
    top,
    trace,
)
from cluster.commands.flags import client_flags
from cluster.interrupts import interrupt_on_signals
from kvferry.config import settings
from kvferry.errors import ConfigError, InvalidInput, KvferryError

if TYPE_CHECKING:
    from collections.abc import Sequence

_USAGE_ERROR = 2
_INTERRUPTED = 130
_GROUPS = (local, nodes, ask, look, top, trace, plan, orders, rollout, simulate, bench)
"""In the order in which the help shows them."""
_WITH_SETTINGS = ("serve", "demo", "up", "down", "apply", "simulate")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; what it returns is the exit code."""
    parser = build_parser()
    known, unknown = parser.parse_known_args(arguments)
    if unknown:
        return _fail(_explain_unknown(unknown, known.command), _USAGE_ERROR)
    try:
        with interrupt_on_signals():
            known.run(known)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ConfigError, InvalidInput) as error:
        return _fail(str(error), _USAGE_ERROR)
    except (KvferryError, CallFailed, console.AuditFailed) as error:
        return _fail(str(error), 1)
    return 0


def build_parser() -> argparse.ArgumentParser:
    """All commands and their flags. The flags of settings are made from `kvferry.config`."""
    parser = argparse.ArgumentParser(
        prog="kvferry",
        description="Serve a language model with separate prefill and decode.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for group in _GROUPS:
        group.add(commands)
    return parser


def _explain_unknown(unknown: list[str], command: str) -> str:
    text = f"unknown argument {unknown[0]}; see `kvferry {command} --help`"
    names = [*ask.ask_flags(), *client_flags(), "--drain-s", "--recent", "--once", "--interval-s"]
    if command in _WITH_SETTINGS:
        names = [f"--{name}" for name, _ in settings()]
    if command == "simulate":
        names += simulate.simulate_flags()
    near = difflib.get_close_matches(unknown[0].partition("=")[0], names, n=1)
    return f"unknown argument {unknown[0]}; did you mean {near[0]}?" if near else text


def _fail(text: str, code: int) -> int:
    print(f"kvferry: {text}", file=sys.stderr)  # noqa: T201
    return code


if __name__ == "__main__":
    sys.exit(main())
