"""`simulate`: play a trace against a cluster in simulated time."""

from __future__ import annotations

import dataclasses
import gc
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.run_text import run_lines
from cluster.commands.flags import add_command, add_settings, config_of
from cluster.commands.route_text import explanation_lines
from cluster.commands.run_records import add_targets, targets_of, write_to
from cluster.commands.worker_deaths import death_of
from kvferry.errors import InvalidInput
from simulator.run_record import run_record
from simulator.settings import SimSettings
from simulator.step_times import StepTimes
from simulator.timing import preset_names, read_timing
from simulator.workload import generated, read_workload

if TYPE_CHECKING:
    import argparse

    from bench.record import RunRecord
    from simulator.simulation import Simulation
    from simulator.workload import Workload

_GENERATED = "generated"


def add(commands: Any) -> None:
    """Add the command of this file."""
    text = "play a trace against a cluster in simulated time"
    command = add_command(commands, "simulate", _simulate, text)
    add_settings(command)
    command.usage = "%(prog)s --trace PATH [--requests N] [--rate R] [--SETTING VALUE ...]"
    group = command.add_argument_group("what is simulated")
    group.add_argument("--prefill", type=int, help="workers; default: workers.prefill.count")
    group.add_argument("--decode", type=int, help="workers; default: workers.decode.count")
    group.add_argument("--both", type=int, help="workers; default: workers.both.count")
    group.add_argument(
        "--workers-per-host", type=int, default=1, help="who slow one another; default: %(default)s"
    )
    group.add_argument("--kv-tokens", type=int, help="of each worker; default: by its memory")
    group.add_argument("--trace", default=_GENERATED, help="a file, or: %(default)s")
    group.add_argument("--requests", type=int, help="default: those of the trace")
    group.add_argument("--rate", type=float, help="requests per second; default: as recorded")
    group.add_argument(
        "--timing", help=f"of kvferry bench profile, or one of {', '.join(preset_names())}"
    )
    group.add_argument("--event-delay-s", type=float, default=SimSettings().event_delay_s)
    group.add_argument("--event-loss", type=float, default=0.0, help="share of KV events")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument(
        "--death", action="append", default=[], metavar="WORKER@S[+S]", help="when, and back after"
    )
    add_targets(group, "for goodput")
    group.add_argument(
        "--explain", type=int, metavar="REQUEST", help="show why this one went where it went"
    )
    group.add_argument("--out", type=Path, help="write the run record to this file")
    group.add_argument("--json", action="store_true", help="print the summary as JSON")


def simulate_flags() -> list[str]:
    """Names of what `add` adds beside settings, for near misses."""
    of_workers = ["--prefill", "--decode", "--both", "--workers-per-host", "--kv-tokens"]
    of_load = ["--trace", "--requests", "--rate", "--timing", "--death", "--seed"]
    of_events = ["--event-delay-s", "--event-loss"]
    return [*of_workers, *of_load, *of_events, "--targets", "--explain", "--out", "--json"]


def _simulate(arguments: argparse.Namespace) -> None:
    # The row table of a worker is made with torch, which takes seconds to load.
    from simulator.simulation import Simulation

    times = StepTimes() if arguments.timing is None else read_timing(arguments.timing).times
    settings = _settings_of(arguments, times)
    workload = _workload_of(arguments)
    count = arguments.requests or len(workload.patterns)
    rate = arguments.rate or workload.rate
    if count < 1 or rate <= 0.0:
        raise InvalidInput("requests", "and rate are above 0")
    simulation = Simulation(settings, times, workload.context_tokens)
    deaths, targets = [death_of(text) for text in arguments.death], targets_of(arguments.targets)
    for death in deaths:
        if death.worker_id not in simulation.workers:
            raise InvalidInput("death", f"{death.worker_id} is no worker of this cluster")
    simulation.explained = arguments.explain
    if arguments.explain is not None and not 0 <= arguments.explain < count:
        raise InvalidInput("explain", f"is {arguments.explain}; requests are 0 to {count - 1}")
    # Millions of objects live and none of them in cycles: to look for these takes longer than all.
    gc.disable()
    coming = workload.requests(count, rate, settings.page_size, settings.seed)
    columns = simulation.run(coming, deaths)
    simulation.check_idle()
    load = {"mode": "open", "rate": rate}
    record = run_record(settings, times, workload.name, load, columns, deaths, targets)
    if arguments.out is not None:
        write_to(record, arguments.out)
    _print_summary(record, simulation, as_json=arguments.json)


def _settings_of(arguments: argparse.Namespace, times: StepTimes) -> SimSettings:
    given = {
        "prefill": arguments.prefill,
        "decode": arguments.decode,
        "both": arguments.both,
        "kv_tokens": arguments.kv_tokens,
    }
    settings = dataclasses.replace(
        SimSettings.of(config_of(arguments), times.kv_bytes_per_token),
        event_delay_s=arguments.event_delay_s,
        event_loss=arguments.event_loss,
        seed=arguments.seed,
        workers_per_host=arguments.workers_per_host,
        **{name: value for name, value in given.items() if value is not None},
    )
    settings.check()
    return settings


def _workload_of(arguments: argparse.Namespace) -> Workload:
    if arguments.trace == _GENERATED:
        return generated(arguments.requests or 1000, 2000, 200, arguments.seed)
    path = Path(arguments.trace)
    if not path.is_file():
        raise InvalidInput("trace", f"{path} is no file")
    return read_workload(path, arguments.seed)


def _print_summary(record: RunRecord, simulation: Simulation, *, as_json: bool) -> None:
    why, number = simulation.explanations, simulation.explained
    if as_json:
        summary = dict(record.summary)
        if number is not None:
            summary["explained"] = [
                {"at_s": at_s, **dataclasses.asdict(each)} for at_s, each in why
            ]
        print(json.dumps(summary))  # noqa: T201
        return
    lines = [*run_lines(record)]
    if number is not None:
        lines += ["", f"request {number}: {len(why)} choices"]
        lines += [line for at_s, each in why for line in explanation_lines(at_s, each)]
    print("\n".join(lines))  # noqa: T201
