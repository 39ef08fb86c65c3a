"""`bench run`: one run of the load generator, and its record."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.client_pool import START_LEAD_S, ClientPool
from bench.machine import machine, versions
from bench.parts import duration_s, late_clients, requests_of_rows
from bench.plan import (
    Arrivals,
    DatasetKind,
    DatasetPlan,
    Door,
    EndpointPlan,
    LoadPlan,
    RunPlan,
    check_plan,
    plan_values,
)
from bench.record import About, LoadMode, RunKind, Targets
from bench.run_text import run_lines
from bench.summary import summarized
from cluster.bench_server import server_of
from cluster.commands.flags import add_address, add_command, client_of
from cluster.commands.run_records import add_targets, targets_of, write_to
from cluster.interrupts import ignore_signals
from kvferry.clock import MonotonicClock, unix_time_s
from kvferry.errors import InvalidInput, WorkerUnavailable

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from enum import Enum

    from bench.client_pool import PoolResult
    from bench.record import RunRecord

_DATASET_TEXTS = {
    "prompt-tokens": "of a generated prompt, or of each turn",
    "answer-tokens": "of a generated answer",
    "prefix-tokens": "that a group of prompts begins with",
    "groups": "with a prefix of their own (shared-prefix)",
    "turns": "of a conversation (multi-turn)",
    "length-spread": "generated prompts differ by this part, both ways",
    "scale-tokens": "factor on the lengths of a trace",
    "context-max": "cut prompts and answers to this together; 0: to the model's context",
}
_LOAD_TEXTS = {
    "rate": "conversations per second (open)",
    "burstiness": "coefficient of variation of the gaps (gamma)",
    "concurrency": "conversations at a time (closed)",
    "think-s": "of a user before a conversation (closed)",
    "time-scale": "factor on the times of a trace; .5 is twice the load",
    "warmup-s": "at the beginning, of which the record has nothing",
}


def add(commands: Any) -> None:
    """Add the command of this file."""
    run = add_command(commands, "run", _run, "put load on a server and record what came of it")
    add_address(run)
    text = "base URL of a server of OpenAI's API, ending with /v1, instead of --address"
    run.add_argument("--http", default="", metavar="URL[,URL]", help=text)
    run.add_argument("--model", default="", help="default: the one that is served")
    run.add_argument("--vocab-size", type=int, default=0, help="where the server tells none")
    _add_dataset(run.add_argument_group("what is asked"))
    _add_load(run.add_argument_group("when"))
    _add_outcome(run.add_argument_group("what is done with it"))


def _add_dataset(group: Any) -> None:
    defaults = DatasetPlan()
    _add_choice(group, "dataset", DatasetKind, defaults.kind, "")
    group.add_argument("--path", default="", help="of the trace or of the prompts")
    group.add_argument("--requests", type=int, default=defaults.requests_max, help="at most")
    _add_numbers(group, _DATASET_TEXTS, defaults)
    group.add_argument("--seed", type=int, default=0)


def _add_load(group: Any) -> None:
    defaults = LoadPlan()
    _add_choice(group, "load", LoadMode, defaults.mode, "")
    _add_choice(group, "arrivals", Arrivals, defaults.arrivals, "")
    _add_numbers(group, _LOAD_TEXTS, defaults)
    text = "of a request, after which it is cancelled; default: %(default)s"
    group.add_argument("--deadline-s", type=float, default=600.0, help=text)
    group.add_argument("--clients", type=int, default=1, help="processes that send")
    text = "send part K (from 1) of N; the others are sent from other nodes"
    group.add_argument("--part", default="1/1", metavar="K/N", help=text)
    text = "begin at this time of day (ISO 8601, or seconds since 1970), as the other nodes do"
    group.add_argument("--start-at", default="", metavar="TIME", help=text)


def _add_outcome(group: Any) -> None:
    add_targets(group, "for goodput")
    group.add_argument("--name", default="", help="of the run; default: that of the data set")
    group.add_argument("--out", type=Path, metavar="FILE", help="where the record goes")
    group.add_argument("--json", action="store_true", help="print the summary as one line of JSON")


def _add_choice(group: Any, name: str, kind: type[Enum], default: Enum, text: str) -> None:
    values = ", ".join(member.value for member in kind)
    text = f"{text}one of {values}; default: {default.value}"
    group.add_argument(f"--{name}", default=default.value, help=text, metavar="KIND")


def _add_numbers(group: Any, texts: dict[str, str], defaults: Any) -> None:
    for name, text in texts.items():
        default = getattr(defaults, name.replace("-", "_"))
        help_text = f"{text}; default: %(default)s"
        group.add_argument(f"--{name}", type=type(default), default=default, help=help_text)


def _run(arguments: argparse.Namespace) -> None:
    targets = targets_of(arguments.targets)
    start_at_unix_s = start_of(arguments.start_at)
    plan = plan_of(arguments)
    check_plan(replace(plan, parts=arguments.clients))
    server = server_of(plan.endpoint, lambda: client_of(arguments))
    plan = replace(plan, endpoint=server.endpoint, dataset=_fitting(plan, server.context_length))
    record, interrupted = _measured(arguments, plan, start_at_unix_s, targets, server.config)
    with ignore_signals():
        if arguments.out is not None:
            write_to(record, arguments.out)
        if arguments.json:
            print(json.dumps(dict(record.summary)))  # noqa: T201
        else:
            print("\n".join(run_lines(record)))  # noqa: T201
    if interrupted:
        raise KeyboardInterrupt


def _measured(
    arguments: argparse.Namespace,
    plan: RunPlan,
    start_at_unix_s: float | None,
    targets: Targets | None,
    config: dict[str, Any],
) -> tuple[RunRecord, bool]:
    clock = MonotonicClock()
    with ClientPool(plan, arguments.clients, clock) as pool:
        requests = pool.wait_ready()
        lead_s = START_LEAD_S if start_at_unix_s is None else start_at_unix_s - unix_time_s()
        if lead_s < 0:
            raise InvalidInput("start-at", f"was {-lead_s:.1f} s ago when all clients were ready")
        started = datetime.fromtimestamp(unix_time_s() + lead_s, UTC)
        result = _with_progress(pool, clock.now() + lead_s, requests)
    record = _recorded(plan, result, (arguments.name, started), targets, config)
    if not len(record.requests) and result.lost:
        raise WorkerUnavailable("every client died; nothing was recorded")
    return record, result.interrupted


def _recorded(
    plan: RunPlan,
    result: PoolResult,
    named: tuple[str, datetime],
    targets: Targets | None,
    config: dict[str, Any],
) -> RunRecord:
    load, mode = plan.load, plan.load.mode
    every = requests_of_rows(result.rows, mode, 0.0)
    client_of = {
        row["index"]: client for row, client in zip(result.rows, result.client_of_row, strict=True)
    }
    late = late_clients(every, [client_of[index] for index in every.index.tolist()])
    lost = [f"client {client} died; what it sent is missing" for client in result.lost]
    requests = requests_of_rows(result.rows, mode, load.warmup_s)
    dataset = {"name": _name_of(plan), **plan_values(plan.dataset)}
    about = About(
        name=named[0] or dataset["name"],
        kind=RunKind.MEASURED,
        started=named[1].isoformat(),
        duration_s=duration_s(requests),
        dataset=dataset,
        load=plan_values(load),
        endpoint=plan.endpoint.door.value,
        seed=plan.seed,
        targets=targets,
        config=config,
        versions=versions(),
        machine=machine(),
        interrupted=result.interrupted or bool(result.lost),
        warnings=(*lost, *late),
    )
    return summarized(about, requests)


def _with_progress(pool: ClientPool, start_at: float, requests: int) -> PoolResult:
    # Imported here: only this command shows a bar.
    import tqdm

    with tqdm.tqdm(
        total=requests, unit="request", file=sys.stderr, disable=not sys.stderr.isatty()
    ) as bar:
        advance: Callable[[int], None] = bar.update
        return pool.run(start_at, advance)


def plan_of(arguments: argparse.Namespace) -> RunPlan:
    """Of all nodes and clients but for `part`, which is this node's. Raises `InvalidInput`."""
    part, parts = part_of(arguments.part)
    names = {name.replace("-", "_") for name in _DATASET_TEXTS}
    dataset = DatasetPlan(
        kind=_member(DatasetKind, "dataset", arguments.dataset),
        path=arguments.path,
        requests_max=arguments.requests,
        **{name: vars(arguments)[name] for name in names},
    )
    load = LoadPlan(
        mode=_member(LoadMode, "load", arguments.load),
        arrivals=_member(Arrivals, "arrivals", arguments.arrivals),
        **{name.replace("-", "_"): vars(arguments)[name.replace("-", "_")] for name in _LOAD_TEXTS},
    )
    endpoint = EndpointPlan(
        door=Door.HTTP if arguments.http else Door.GRPC,
        addresses=tuple((arguments.http or arguments.address).split(",")),
        model=arguments.model,
        vocab_size=arguments.vocab_size,
        **{name: str(vars(arguments)[name] or "") for name in _TLS},
    )
    return RunPlan(endpoint, dataset, load, arguments.seed, arguments.deadline_s, part, parts)


_TLS = ("tls_ca", "tls_certificate", "tls_key")


def _member(kind: type[Any], flag: str, text: str) -> Any:
    values = [member.value for member in kind]
    if text not in values:
        raise InvalidInput(flag, f"is {text!r}; must be one of {', '.join(values)}")
    return kind(text)


def part_of(text: str) -> tuple[int, int]:
    """(part from 0, parts) of "K/N". Raises `InvalidInput`."""
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise InvalidInput("part", f"is {text!r}; must be K/N with K from 1 to N")
    return int(part) - 1, int(parts)


def start_of(text: str) -> float | None:
    """Seconds since 1970; None: when all are ready. Raises `InvalidInput`."""
    if not text:
        return None
    try:
        if text.replace(".", "", 1).isdecimal():
            return float(text)
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidInput("start-at", f"is {text!r}: {error}") from error
    if moment.tzinfo is None:
        raise InvalidInput("start-at", f"is {text!r}; it needs a time zone, such as +00:00")
    return moment.timestamp()


def _fitting(plan: RunPlan, context_length: int) -> DatasetPlan:
    dataset = plan.dataset
    return dataset if dataset.context_max else replace(dataset, context_max=context_length)


def _name_of(plan: RunPlan) -> str:
    path = plan.dataset.path
    return os.path.basename(path).split(".")[0] if path else plan.dataset.kind.value
