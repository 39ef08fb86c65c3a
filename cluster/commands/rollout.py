"""`apply`, `restart`, `rollout`: a running cluster gets another configuration, or new processes."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from cluster.client import CallFailed
from cluster.commands.flags import add_address, add_command, add_settings, client_of, config_of
from kvferry.config import to_mapping
from kvferry.errors import InvalidInput, WorkerUnavailable
from kvferry.limits import DRAIN_S, ROLLOUT_CHECK_INTERVAL_S, SUPERVISOR_AWAY_MAX_S

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from typing import TypeAlias

    from cluster.client import Client
    from kvferry.rpc.v1 import inference_pb2 as inference
    from router.cluster_control import RolloutReport

    RolloutProgress: TypeAlias = inference.RolloutStatus | RolloutReport

_ALL = "all"


def add(commands: Any) -> None:
    """Add the commands of this file."""
    text = "have a running cluster use another configuration, without a failed request"
    apply = add_command(commands, "apply", _apply, text)
    add_settings(apply)
    text = "replace workers by new processes, one after the other"
    restart = add_command(commands, "restart", _restart, text)
    restart.add_argument("worker", nargs="+", help=f"by name, or {_ALL!r}")
    show = add_command(commands, "rollout", _rollout, "show how far the last rollout is")
    for command in (apply, restart):
        add_waiting(command)
    for command in (apply, restart, show):
        add_address(command)


def add_waiting(command: argparse.ArgumentParser) -> None:
    """Flags of a command that begins a rollout."""
    text = "how long each may take to do what it has; default: %(default)s"
    command.add_argument("--drain-s", type=float, default=DRAIN_S, help=text)
    text = "return at once; `kvferry rollout` shows the progress"
    command.add_argument("--no-wait", action="store_true", help=text)


def show_rollout(
    status: RolloutProgress, ask: Callable[[], RolloutProgress], *, is_awaited: bool
) -> None:
    """Print what an `apply` changes, then each step until it is over.

    Raises `WorkerUnavailable` when it has failed.
    """
    if not status.changes:
        print("nothing differs from what the cluster runs under")  # noqa: T201
        return
    print(f"changes: {', '.join(status.changes)}", flush=True)  # noqa: T201
    _follow(status, ask, is_awaited=is_awaited)


def _apply(arguments: argparse.Namespace) -> None:
    # Imported here: they load what the other commands need not wait for.
    from cluster.commands.local import resolved
    from cluster.local_cluster import check_security

    config = resolved(check_security(config_of(arguments)))
    text = json.dumps(to_mapping(config))
    with client_of(arguments) as client:
        status = client.apply(text, arguments.drain_s)
        show_rollout(status, lambda: _ask(client), is_awaited=not arguments.no_wait)


def _restart(arguments: argparse.Namespace) -> None:
    names = arguments.worker
    if _ALL in names:
        if len(names) > 1:
            raise InvalidInput("worker", f"is {_ALL!r} and names; give one or the other")
        names = []
    with client_of(arguments) as client:
        status = client.restart(names, arguments.drain_s)
        _follow(status, lambda: _ask(client), is_awaited=not arguments.no_wait)


def _rollout(arguments: argparse.Namespace) -> None:
    with client_of(arguments) as client:
        print(_text_of(client.rollout()))  # noqa: T201


def _follow(
    status: RolloutProgress, ask: Callable[[], RolloutProgress], *, is_awaited: bool
) -> None:
    """Print each step until it is over. Raises `WorkerUnavailable` when it has failed."""
    last = ""
    while True:
        text = _text_of(status)
        if text != last:
            print(text, flush=True)  # noqa: T201
            last = text
        if status.phase == "failed":
            raise WorkerUnavailable(f"the rollout has failed: {status.detail}")
        if status.phase != "running" or not is_awaited:
            return
        time.sleep(ROLLOUT_CHECK_INTERVAL_S)
        status = ask()


def _ask(client: Client) -> inference.RolloutStatus:
    """The router may be one that is being replaced, and the supervisor one that comes back."""
    tries = round(SUPERVISOR_AWAY_MAX_S / ROLLOUT_CHECK_INTERVAL_S)
    while True:
        try:
            return client.rollout()
        except CallFailed:
            tries -= 1
            if tries == 0:
                raise
            time.sleep(ROLLOUT_CHECK_INTERVAL_S)


def _text_of(status: RolloutProgress) -> str:
    head = f"revision {status.revision} {status.phase}"
    if status.to_replace:
        head += f", {status.replaced} of {status.to_replace} replaced"
    return f"{head}: {status.detail}" if status.detail else head
