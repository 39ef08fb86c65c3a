"""`up` and `down`: a cluster on the nodes of a running Ray cluster."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from cluster.commands.flags import add_command, add_settings, config_of
from cluster.interrupts import ignore_signals
from kvferry.clock import MonotonicClock

if TYPE_CHECKING:
    import argparse

    from kvferry.config import ClusterConfig


def add(commands: Any) -> None:
    """Add the commands of this file."""
    text = "start a cluster on the nodes of a running Ray cluster"
    up = add_command(commands, "up", _up, text)
    text = "stay, tell who ends and comes back, and end with an error when the cluster is gone"
    up.add_argument("--stay", action="store_true", help=f"{text}; one that runs is joined")
    add_settings(up)
    text = "end the cluster that `up` has started; Ray goes on"
    add_settings(add_command(commands, "down", _down, text))


def _up(arguments: argparse.Namespace) -> None:
    # Imported here: Ray takes a second to load, which the client commands need not wait for.
    from cluster.ray_cluster import ClusterExists, stay_with

    config = config_of(arguments)
    if arguments.stay:
        with contextlib.suppress(ClusterExists):
            _bring_up(config)
        stay_with(config.ray, MonotonicClock(), _say)
    else:
        _bring_up(config)


def _bring_up(config: ClusterConfig) -> None:
    from cluster.ray_cluster import bring_up

    print("starting ... (the first start on a machine compiles kernels)", flush=True)  # noqa: T201
    view = bring_up(config, MonotonicClock())
    scheme = "https" if config.router.security.tls_certificate else "http"
    addresses = ",".join(router.address for router in view.routers)
    urls = " ".join(f"{scheme}://{router.http_address}/v1" for router in view.routers)
    print(  # noqa: T201
        f"kvferry serves {config.model.served_name} at {addresses}, the OpenAI API at {urls}; "
        "`kvferry down` ends it"
    )


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def _down(arguments: argparse.Namespace) -> None:
    from cluster.ray_cluster import take_down

    config = config_of(arguments)
    with ignore_signals():
        report = take_down(config.ray, MonotonicClock())
    if not report.was_up:
        text = f"no kvferry cluster {config.ray.namespace!r} was there"
    elif report.killed:
        text = f"stopped; by force: {', '.join(report.killed)}"
    else:
        text = "stopped"
    print(text)  # noqa: T201
