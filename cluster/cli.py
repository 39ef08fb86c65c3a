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
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster import console
from cluster.client import CallFailed, Client
from cluster.client_security import ClientSecurity
from cluster.cluster_state import Phase
from cluster.interrupts import ignore_signals, interrupt_on_signals
from kvferry.cache_key import Sharing
from kvferry.clock import MonotonicClock
from kvferry.config import BUNDLED_MODEL, load_config, settings
from kvferry.convert import sharing_to_wire
from kvferry.errors import ConfigError, InvalidInput, KvferryError
from kvferry.limits import DRAIN_S
from kvferry.membership import Role
from kvferry.router_config import RouterConfig, SecurityConfig
from kvferry.rpc.v1 import inference_pb2 as inference
from kvferry.setting_texts import setting_texts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.local_cluster import LocalCluster
    from cluster.supervisor import ClusterView
    from kvferry.config import ClusterConfig

_USAGE_ERROR = 2
_INTERRUPTED = 130
_SETTING_PREFIX = "setting:"
_WATCH_S = 1.0
_API_KEY_VARIABLE = "KVFERRY_API_KEY"
"""Not a flag: everybody on a machine sees those of every process."""


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
    serve = _add(commands, "serve", _serve, "start a cluster on this machine and keep it running")
    _add_settings(serve)
    demo = _add(commands, "demo", _demo, "start a cluster, ask it three questions, stop it")
    _add_settings(demo)
    generate = _add(commands, "generate", _generate, "answer one prompt")
    generate.add_argument("prompt")
    generate.add_argument("--raw", action="store_true", help="continue the text as it is")
    generate.add_argument("--usage", action="store_true", help="say what it cost, on stderr")
    generate.add_argument(
        "--n", type=int, default=1, help="answers to print; they differ if --temperature is set"
    )
    chat = _add(commands, "chat", _chat, "a conversation, turn by turn")
    for command in (generate, chat):
        command.add_argument("--model", default="", help="name of an adapter; default: none")
        _add_cache_use(command)
    status = _add(commands, "status", _status, "show the workers and their accounts")
    status.add_argument("--counters", action="store_true", help="show what each worker counted")
    audit = _add(commands, "audit", _audit, "check every account of KV on the running workers")
    audit.add_argument("worker", nargs="?", default="", help="default: all of them")
    for command in (generate, chat, status, audit, *_add_orders(commands)):
        _add_address(command)
    for command in (generate, chat):
        _add_sampling(command)
    model = _add(commands, "import-model", _import_model, "make a model ready to be served")
    model.add_argument("model", nargs="?", default=BUNDLED_MODEL, help="default: %(default)s")
    return parser


def _add_orders(commands: Any) -> tuple[argparse.ArgumentParser, ...]:
    """Who shall be in the cluster."""
    add = _add(commands, "add-worker", _add_worker, "start one more worker")
    change = _add(commands, "set-role", _set_role, "use a worker for something else from now on")
    remove = _add(commands, "remove-worker", _remove_worker, "drain a worker, then end it")
    for command in (change, remove):
        command.add_argument("worker")
    for command in (add, change):
        command.add_argument("role", choices=[role.value for role in Role])
    text = "how long it may take to do what it has; default: %(default)s"
    remove.add_argument("--drain-s", type=float, default=DRAIN_S, help=text)
    return add, change, remove


def _add(commands: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text, allow_abbrev=False
    )
    command.set_defaults(run=run)
    return command


def _add_settings(command: argparse.ArgumentParser) -> None:
    # Without this all settings would be listed twice.
    command.usage = "%(prog)s [--config FILE] [--SETTING VALUE ...]"
    command.add_argument("--config", type=Path, metavar="FILE", help="YAML; see kvferry.yaml")
    title = "settings, over those of the file; the default in brackets"
    group = command.add_argument_group(title)
    texts = setting_texts()
    for name, default in settings():
        group.add_argument(
            f"--{name}",
            dest=f"{_SETTING_PREFIX}{name}",
            metavar="VALUE",
            help=f"{texts[name]} {_values_of(default)}".replace("%", "%%"),
        )


def _values_of(default: Any) -> str:
    """What a setting may be, where that is a list, and what it is when nobody sets it."""
    if not isinstance(default, Enum):
        return f"[{'empty' if default in ('', {}) else default}]"
    names = ", ".join(member.value for member in type(default))
    return f"One of {names} [{default.value}]"


def _add_address(command: argparse.ArgumentParser) -> None:
    default = RouterConfig()
    command.add_argument(
        "--address", default=f"{default.host}:{default.port}", help="default: %(default)s"
    )
    group = command.add_argument_group(
        "security",
        f"PEM files; the API key, where one is needed, is taken from {_API_KEY_VARIABLE}",
    )
    for name, text in _TLS_FLAGS:
        group.add_argument(f"--{name}", type=Path, metavar="FILE", help=text)


_TLS_FLAGS = (
    ("tls-ca", "who signed the router's certificate; without it, no TLS"),
    ("tls-certificate", "of this client, for routers that ask for one"),
    ("tls-key", "its private key"),
)


def _client(arguments: argparse.Namespace) -> Client:
    security = ClientSecurity(
        tls_ca=arguments.tls_ca,
        tls_certificate=arguments.tls_certificate,
        tls_key=arguments.tls_key,
        api_key=os.environ.get(_API_KEY_VARIABLE, ""),
    )
    return Client(arguments.address, security=security)


_SAMPLING_FLAGS: tuple[tuple[str, type, str], ...] = (
    ("max_tokens", int, "longest answer, bounded by the context; default: 128"),
    ("temperature", float, "randomness; 0, the default here, takes the likeliest token"),
    ("top_k", int, "choose among so many likeliest tokens; 0 among all"),
    ("top_p", float, "choose among the likeliest tokens that have this probability together"),
    ("min_p", float, "drop tokens less likely than this share of the likeliest"),
    ("repetition_penalty", float, "above 1 makes tokens seen before less likely"),
    ("presence_penalty", float, "taken off tokens that the answer has"),
    ("frequency_penalty", float, "taken off for each time that the answer has a token"),
    ("seed", int, "the same seed gives the same answer; drawn by the server if not given"),
)
_TEMPERATURE = 0.0
"""The server's default is 1, as everywhere; a small model talks nonsense at that."""


def _add_sampling(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("sampling")
    for name, kind, text in _SAMPLING_FLAGS:
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, dest=name, help=text)
    command.set_defaults(temperature=_TEMPERATURE)
    group.add_argument("--stop", action="append", default=[], help="may be given several times")


_SHARING_NAMES = {sharing.value: sharing for sharing in Sharing}


def _add_cache_use(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("cache")
    group.add_argument("--cache-salt", default="", help="share KV only with the same salt")
    group.add_argument(
        "--sharing",
        default=Sharing.SHARED.value,
        metavar="WAY",
        help="shared: use cached KV and leave some; recomputed: leave some; private: neither; "
        "default: %(default)s",
    )
    group.add_argument(
        "--priority", type=int, default=0, help="-100 to 100: how long to keep its KV; default: 0"
    )


def _serve(arguments: argparse.Namespace) -> None:
    # Imported here: Ray takes a second to load, which the client commands need not wait for.
    from cluster.local_cluster import LocalCluster, check_port_free, check_security

    config = _resolved(check_security(_config_of(arguments)))
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
    seen = {report.name: report.phase for report in view.reports}
    try:
        while True:
            view = cluster.wait_for_change(view.changes, _WATCH_S)
            for report in view.reports:
                if report.phase is not seen.get(report.name):
                    reason = f" ({report.last_end})" if report.phase is Phase.WAITING else ""
                    print(f"{report.name}: {report.phase.value}{reason}", flush=True)  # noqa: T201
                    seen[report.name] = report.phase
            for name in seen.keys() - {report.name for report in view.reports}:
                print(f"{name}: removed", flush=True)  # noqa: T201
                del seen[name]
    except KeyboardInterrupt:
        return


def _demo(arguments: argparse.Namespace) -> None:
    from cluster.demo import run_demo

    config = _config_of(arguments)
    if config.router.security != SecurityConfig():
        problem = "must be empty: the demo shows no key and no certificate; try `kvferry serve`"
        raise ConfigError("router.security", problem)
    run_demo(_resolved(config), MonotonicClock())


def _generate(arguments: argparse.Namespace) -> None:
    if not arguments.prompt:
        raise InvalidInput("prompt", "must not be empty")
    request = _request_of(arguments)
    try:
        request.sampling.n = arguments.n
    except ValueError as error:
        raise InvalidInput("n", str(error)) from error
    with _client(arguments) as client:
        console.generate(
            client,
            arguments.prompt,
            request,
            raw=arguments.raw,
            show_usage=arguments.usage,
        )


def _chat(arguments: argparse.Namespace) -> None:
    with _client(arguments) as client:
        console.chat(client, _request_of(arguments), sys.stdin)


def _status(arguments: argparse.Namespace) -> None:
    with _client(arguments) as client:
        console.status(client, show_counters=arguments.counters)


def _audit(arguments: argparse.Namespace) -> None:
    with _client(arguments) as client:
        console.audit(client, arguments.worker)


def _add_worker(arguments: argparse.Namespace) -> None:
    with _client(arguments) as client:
        name = client.add_worker(arguments.role)
    print(f"{name} is being started; `kvferry status` shows it when it serves")  # noqa: T201


def _set_role(arguments: argparse.Namespace) -> None:
    with _client(arguments) as client:
        client.set_role(arguments.worker, arguments.role)
    print(f"{arguments.worker} is used for {arguments.role} from now on")  # noqa: T201


def _remove_worker(arguments: argparse.Namespace) -> None:
    with _client(arguments) as client:
        drained = client.remove_worker(arguments.worker, arguments.drain_s)
    rest = "it had nothing left to do" if drained else "what it had goes on at other workers"
    print(f"{arguments.worker} has left the cluster; {rest}")  # noqa: T201


def _import_model(arguments: argparse.Namespace) -> None:
    from engine.model_directory import resolve_model

    print(resolve_model(arguments.model, progress=True))  # noqa: T201


def _config_of(arguments: argparse.Namespace) -> ClusterConfig:
    given = {
        name.removeprefix(_SETTING_PREFIX): text
        for name, text in vars(arguments).items()
        if name.startswith(_SETTING_PREFIX) and text is not None
    }
    # Of the client commands; whoever has it in the environment may start a cluster, too.
    settings_given = {name: os.environ[name] for name in os.environ if name != _API_KEY_VARIABLE}
    return load_config(arguments.config, settings_given, given)


def _resolved(config: ClusterConfig) -> ClusterConfig:
    """With the model converted, once, here: workers find a finished directory."""
    from cluster.local_cluster import with_model_directory
    from engine.model_directory import resolve_model

    return with_model_directory(config, resolve_model(config.model.path, progress=True))


def _request_of(arguments: argparse.Namespace) -> inference.GenerateRequest:
    """Everything but the prompt."""
    sharing = _SHARING_NAMES.get(arguments.sharing)
    if sharing is None:
        names = ", ".join(_SHARING_NAMES)
        raise InvalidInput("sharing", f"is {arguments.sharing!r}; must be one of {names}")
    try:
        return inference.GenerateRequest(
            model=arguments.model,
            sampling=_sampling_of(arguments),
            cache_salt=arguments.cache_salt,
            sharing=sharing_to_wire(sharing),
            priority=arguments.priority,
        )
    except ValueError as error:
        raise InvalidInput("priority", str(error)) from error


def _sampling_of(arguments: argparse.Namespace) -> inference.SamplingParams:
    given = {name: getattr(arguments, name) for name, _, _ in _SAMPLING_FLAGS}
    try:
        return inference.SamplingParams(
            **{name: value for name, value in given.items() if value is not None},
            stop=arguments.stop,
        )
    except ValueError as error:
        raise InvalidInput("sampling", str(error)) from error


def _explain_unknown(unknown: list[str], command: str) -> str:
    text = f"unknown argument {unknown[0]}; see `kvferry {command} --help`"
    names = [f"--{name.replace('_', '-')}" for name, _, _ in _SAMPLING_FLAGS]
    names += ["--cache-salt", "--sharing", "--priority", "--n", "--drain-s", "--model"]
    names += [f"--{name}" for name, _ in _TLS_FLAGS]
    if command in ("serve", "demo"):
        names = [f"--{name}" for name, _ in settings()]
    near = difflib.get_close_matches(unknown[0].partition("=")[0], names, n=1)
    return f"unknown argument {unknown[0]}; did you mean {near[0]}?" if near else text


def _fail(text: str, code: int) -> int:
    print(f"kvferry: {text}", file=sys.stderr)  # noqa: T201
    return code


if __name__ == "__main__":
    sys.exit(main())
