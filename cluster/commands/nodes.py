"""`up` and `down`: a cluster on the nodes of a running Ray cluster."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from cluster.commands.flags import add_command, add_settings, config_of
from cluster.commands.rollout import add_waiting, show_rollout
from cluster.interrupts import ignore_signals
from kvferry.clock import MonotonicClock

if TYPE_CHECKING:
    import argparse

    from kvferry.config import ClusterConfig


def add(commands: Any) -> None:
    """Add the commands of this file."""
    text = "start a cluster on the nodes of a running Ray cluster; one that runs gets the settings"
    up = add_command(commands, "up", _up, text)
    add_waiting(up)
    text = "stay, tell who ends and comes back, and end with an error when the cluster is gone"
    up.add_argument("--stay", action="store_true", help=f"{text}; one that runs is joined as it is")
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
    elif not _change_running(config, arguments):
        _bring_up(config)


def _change_running(config: ClusterConfig, arguments: argparse.Namespace) -> bool:
    """Have a cluster that runs use this configuration. False: there is none.

    Not by way of a router: where it listens and what it asks for may be what changes.
    """
    from cluster.ray_cluster import for_any_node, running_supervisor

    with running_supervisor(config.ray) as supervisor:
        if supervisor is None:
            return False
        print(f"kvferry cluster {config.ray.namespace!r} runs already", flush=True)  # noqa: T201
        show_rollout(
            supervisor.apply(for_any_node(config), arguments.drain_s),
            supervisor.rollout,
            is_awaited=not arguments.no_wait,
        )
    return True


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
