"""`serve` and `demo`: a cluster that this process owns; `import-model` prepares what it serves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cluster.commands.flags import add_command, add_settings, config_of
from cluster.interrupts import ignore_signals
from cluster.member_news import MemberNews
from kvferry.clock import MonotonicClock
from kvferry.config import BUNDLED_MODEL
from kvferry.errors import ConfigError
from kvferry.router_config import SecurityConfig

if TYPE_CHECKING:
    import argparse

    from cluster.local_cluster import LocalCluster
    from cluster.supervisor import ClusterView
    from kvferry.config import ClusterConfig

_WATCH_S = 1.0


def add(commands: Any) -> None:
    """Add the commands of this file."""
    serve = add_command(
        commands, "serve", _serve, "start a cluster on this machine and keep it running"
    )
    add_settings(serve)
    text = "start a cluster, ask it three questions, stop it"
    add_settings(add_command(commands, "demo", _demo, text))
    text = "make a model ready to be served"
    model = add_command(commands, "import-model", _import_model, text)
    model.add_argument("model", nargs="?", default=BUNDLED_MODEL, help="default: %(default)s")


def _serve(arguments: argparse.Namespace) -> None:
    # Imported here: Ray takes a second to load, which the client commands need not wait for.
    from cluster.local_cluster import LocalCluster, check_port_free, check_security

    config = resolved(check_security(config_of(arguments)))
    check_port_free(config.router)
    print("starting ... (the first start on a machine compiles kernels)", flush=True)  # noqa: T201
    cluster = LocalCluster(config, MonotonicClock())
    try:
        view = cluster.start()
        scheme = "https" if config.router.security.tls_certificate else "http"
        print(  # noqa: T201
            f"kvferry serves {config.model.served_name} at {cluster.address} "
            f"(logs in {cluster.directory}), "
            f"the OpenAI API at {scheme}://{cluster.http_address}/v1; Ctrl-C stops it",
            flush=True,
        )
        _watch(cluster, view)
    finally:
        with ignore_signals():
            print("stopping ...", flush=True)  # noqa: T201
            report = cluster.stop()
        print(  # noqa: T201
            "stopped; no process is left"
            if not report.left
            else f"could not end: {', '.join(report.left)}",
            flush=True,
        )


def _watch(cluster: LocalCluster, view: ClusterView) -> None:
    """Tell of members that end and come back, until interrupted: the normal end of serving."""
    news = MemberNews()
    news.lines(view)
    try:
        while True:
            view = cluster.wait_for_change(view.changes, _WATCH_S)
            for line in news.lines(view):
                print(line, flush=True)  # noqa: T201
    except KeyboardInterrupt:
        return


def _demo(arguments: argparse.Namespace) -> None:
    from cluster.demo import run_demo

    config = config_of(arguments)
    if config.router.security != SecurityConfig():
        problem = "must be empty: the demo shows no key and no certificate; try `kvferry serve`"
        raise ConfigError("router.security", problem)
    run_demo(resolved(config), MonotonicClock())


def _import_model(arguments: argparse.Namespace) -> None:
    from engine.model_directory import resolve_model

    print(resolve_model(arguments.model, progress=True))  # noqa: T201


def resolved(config: ClusterConfig) -> ClusterConfig:
    """With the model converted, once, here: workers find a finished directory."""
    from cluster.local_cluster import with_model_directory
    from engine.model_directory import resolve_model

    return with_model_directory(config, resolve_model(config.model.path, progress=True))
