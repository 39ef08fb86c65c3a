"""`bench profile`: measures how long steps take, and writes a timing model for the simulator."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.machine import machine, versions
from bench.profile import CONTEXTS, PROMPT_TOKENS, ROUNDS, ProfilePlan, Profiler
from cluster.commands.flags import add_address, add_command, add_settings, client_of, config_of
from kvferry.clock import MonotonicClock
from kvferry.errors import InvalidInput
from simulator.profile_fit import fit_timing

if TYPE_CHECKING:
    import argparse

    from kvferry.config import ClusterConfig

_ANSWER_ROOM = 128
"""Tokens of the context that are left for answers."""


def add(commands: Any) -> None:
    """Add the command of this file."""
    text = "measure how long the steps of an idle cluster take, for kvferry simulate --timing"
    command = add_command(commands, "profile", _profile, text)
    add_settings(command)
    command.usage = "%(prog)s --out FILE [--address HOST:PORT] [--SETTING VALUE ...]"
    add_address(command)
    command.add_argument("--out", type=Path, required=True, help="the timing model, JSON")
    command.add_argument(
        "--layers",
        type=int,
        help="of the model; default: as the configuration of model.path, which must be here",
    )
    command.add_argument("--rounds", type=int, default=ROUNDS, help="of all prompts")
    command.add_argument(
        "--error-max",
        type=float,
        default=0.15,
        help="refuse a model that half of the measurements are further from; default: %(default)s",
    )


def _profile(arguments: argparse.Namespace) -> None:
    config = config_of(arguments)
    # Loads torch.
    from engine.model_directory import resolve_model

    layers = arguments.layers or layers_of(Path(resolve_model(config.model.path)))
    if arguments.rounds < 1:
        raise InvalidInput("rounds", f"is {arguments.rounds}; at least 1")
    with client_of(arguments) as client:
        info = client.model_info()
        plan = plan_of(config, info.context_length, info.page_size, arguments.rounds)
        profiler = Profiler(client, plan, MonotonicClock(), time.sleep, _report)
        profile = profiler.run()
    about = {
        "model": info.model,
        "dtype": info.dtype,
        "machine": machine(),
        "versions": versions(),
        "load_average": os.getloadavg(),
        "workers": profile.workers,
    }
    timing = fit_timing(profile, layers, arguments.error_max, about)
    arguments.out.write_text(timing.text(), encoding="utf-8")
    _report(json.dumps(timing.about["residuals"]))


def plan_of(config: ClusterConfig, context_length: int, page_size: int, rounds: int) -> ProfilePlan:
    """What to measure: what fits into the context of the model."""
    room = context_length - _ANSWER_ROOM
    return ProfilePlan(
        chunk_tokens=config.scheduler.chunk_tokens,
        page_size=page_size,
        status_interval_s=config.router.status_interval_s,
        prompt_tokens=tuple(n for n in PROMPT_TOKENS if n <= room),
        contexts=tuple(n for n in CONTEXTS if n <= room),
        rounds=rounds,
    )


def layers_of(directory: Path) -> int:
    """As the configuration of a model says. Raises `InvalidInput`."""
    file = directory / "config.json"
    try:
        layers = json.loads(file.read_text(encoding="utf-8"))["num_hidden_layers"]
    except (OSError, ValueError, KeyError) as error:
        raise InvalidInput("layers", f"is not given and {file} does not tell: {error}") from error
    return int(layers)


def _report(text: str) -> None:
    print(text, file=sys.stderr)  # noqa: T201
