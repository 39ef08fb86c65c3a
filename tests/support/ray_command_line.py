"""Whether Ray's own command would take a line of ours."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_WITH_TRUE_OR_FALSE = ("log-color", "include-dashboard")
"""Flags of `ray start` to which KubeRay hands on true and false; others are there or not."""


class RefusedByRay(Exception):
    """What Ray says to the line."""


def check_ray_command(line: str) -> str:
    """The command of a shell line such as `NAME=x /bin/ray start --head`. Raises `RefusedByRay`."""
    words = shlex.split(line)
    while _ASSIGNMENT.match(words[0]):
        del words[0]
    assert words[0].split("/")[-1] == "ray", line
    check_ray_arguments(words[1], words[2:])
    return words[1]


def check_ray_arguments(command: str, arguments: Sequence[str]) -> None:
    """Raises `RefusedByRay`."""
    # Imported here: it takes a second, which most tests of deployments need not wait for.
    from ray.scripts.scripts import cli

    try:
        cli.commands[command].make_context(command, list(arguments))
    except (click.ClickException, KeyError) as error:
        raise RefusedByRay(f"{command} {' '.join(arguments)}: {error}") from error


def arguments_of_kuberay(parameters: Mapping[str, str]) -> list[str]:
    """What KubeRay makes of the `rayStartParams` of a group."""
    arguments = []
    for name, text in parameters.items():
        if text in ("true", "false") and name not in _WITH_TRUE_OR_FALSE:
            arguments += [f"--{name}"] * (text == "true")
        else:
            # It goes through a shell.
            arguments += shlex.split(f"--{name}={text}")
    return arguments
