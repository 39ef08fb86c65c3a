"""Flags that several commands share, and what they mean."""

from __future__ import annotations

import math
import os
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.client import Client
from cluster.client_security import ClientSecurity
from kvferry.addresses import LOOPBACK
from kvferry.config import load_config, settings
from kvferry.errors import InvalidInput
from kvferry.router_config import API_KEY_VARIABLE, RouterConfig
from kvferry.setting_texts import setting_texts

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from kvferry.config import ClusterConfig

_SETTING_PREFIX = "setting:"
_INTERVAL_S = 1.0
_INTERVAL_MIN_S = 0.2
_TLS_FLAGS = (
    ("tls-ca", "who signed the router's certificate; without it, no TLS"),
    ("tls-certificate", "of this client, for routers that ask for one"),
    ("tls-key", "its private key"),
)


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], None], text: str
) -> argparse.ArgumentParser:
    """One more command of the parser, without flags."""
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text, allow_abbrev=False
    )
    command.set_defaults(run=run)
    return command


def add_settings(command: argparse.ArgumentParser) -> None:
    """A flag for each setting, and one for the file; `config_of` reads them."""
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


def config_of(arguments: argparse.Namespace) -> ClusterConfig:
    """The configuration of file, environment and flags. Raises `ConfigError`."""
    given = {
        name.removeprefix(_SETTING_PREFIX): text
        for name, text in vars(arguments).items()
        if name.startswith(_SETTING_PREFIX) and text is not None
    }
    # Of the client commands; whoever has it in the environment may start a cluster, too.
    settings_given = {name: os.environ[name] for name in os.environ if name != API_KEY_VARIABLE}
    return load_config(arguments.config, settings_given, given)


def add_address(command: argparse.ArgumentParser) -> None:
    """How to reach a router; `client_of` reads it."""
    command.add_argument(
        "--address",
        default=f"{LOOPBACK}:{RouterConfig().port}",
        help="of a router, host:port; of several, with commas between them, the next one is asked "
        "when one is gone; default: %(default)s",
    )
    group = command.add_argument_group(
        "security",
        f"PEM files; the API key, where one is needed, is taken from {API_KEY_VARIABLE}",
    )
    for name, text in _TLS_FLAGS:
        group.add_argument(f"--{name}", type=Path, metavar="FILE", help=text)


def client_of(arguments: argparse.Namespace) -> Client:
    """A client of the router that the flags name."""
    security = ClientSecurity(
        tls_ca=arguments.tls_ca,
        tls_certificate=arguments.tls_certificate,
        tls_key=arguments.tls_key,
        api_key=os.environ.get(API_KEY_VARIABLE, ""),
    )
    return Client(*arguments.address.split(","), security=security)


def add_interval(command: argparse.ArgumentParser) -> None:
    """How often to look; `interval_of` reads it."""
    text = "seconds between two looks; default: %(default)s"
    command.add_argument("--interval-s", type=float, default=_INTERVAL_S, help=text)


def interval_of(arguments: argparse.Namespace) -> float:
    """In seconds. Raises `InvalidInput`."""
    interval_s: float = arguments.interval_s
    if not (math.isfinite(interval_s) and interval_s >= _INTERVAL_MIN_S):
        problem = f"is {interval_s:g}; must be at least {_INTERVAL_MIN_S:g}"
        raise InvalidInput("interval-s", problem)
    return interval_s


def client_flags() -> list[str]:
    """Names of what `add_address` adds, for near misses."""
    return ["--address", *(f"--{name}" for name, _ in _TLS_FLAGS)]


def _values_of(default: Any) -> str:
    """What a setting may be, where that is a list, and what it is when nobody sets it."""
    if not isinstance(default, Enum):
        return f"[{'empty' if default in ('', {}) else default}]"
    names = ", ".join(member.value for member in type(default))
    return f"One of {names} [{default.value}]"
