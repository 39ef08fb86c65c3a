"""The planner against every fixed ratio of as many workers.

    python -m benchmarks.planner --json [--workers 8] [--seconds 600] [--seeds 3] [--first-seed 0]
                                        [--load 0.85 1.0] [--shape square-120 ...] [--goodput]
                                        [--explain] [--trace PATH ...]

In simulated time (`benchmarks.planner_sim`), under loads that swing between prompts of 4,000 tokens
with answers of 60 and prompts of 300 with answers of 800 (`benchmarks.planner_load`); shapes are
square-PERIOD, sine-PERIOD, erratic-MEAN and steady-SHARE, in seconds. `--trace`: recorded requests
instead, of several files one after the other, each scaled to the same load. At a load of 1 the best
split for either end just keeps the targets by the planner's own theory.

All contenders are set as an operator with these targets would: `scheduler.running_max` is what a
step within the ITL target has room for, and `scheduler.itl_limit_ms` is `_SLACK` times that target,
which is one of an answer's mean: answers that prompts come to have had shorter steps before.

Attainment is the share of all requests, refused ones among them, that kept both targets: TTFT, and
the mean time between two tokens. The router refuses who would not have its first token in time. All
contenders of a seed get the same requests at the same moments, so relative attainment is relative
goodput: requests within both targets per second. `--goodput` searches for each contender the
largest load at which `--attainment` of the requests still keep both.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.command_line import as_text
from benchmarks.planner_load import (
    Asked,
    arrivals,
    rate_of,
    rates_of,
    recorded,
    shape_of,
)
from benchmarks.planner_sim import PlannerSim, Timing
from cluster.planner import Planner, SwitchRole
from cluster.planner_capacity import Targets
from kvferry.planner_config import PlannerConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHAPES = (
    *("square-60", "square-120", "square-300", "sine-120", "sine-300", "erratic-60"),
    *("steady-0", "steady-0.5", "steady-1"),
)
_CONFIG = PlannerConfig(ttft_s=2.0, itl_ms=25.0)
_SLACK = 1.4
_TIMING = Timing(running_max=48, itl_limit_s=_SLACK * _CONFIG.itl_ms / 1000.0)
_TARGETS = Targets(_CONFIG.ttft_s, _CONFIG.itl_ms / 1000.0, _CONFIG.attainment)
_SEARCH_STEPS = 5
_LOAD_MAX = 1.4
_PLANNED = "planner"


class Played(NamedTuple):
    """What became of one load; shares of all requests."""

    both: float
    ttft: float
    itl: float
    switches: int


def contenders(workers: int) -> dict[str, tuple[int, int]]:
    """Each by its name, with the split that it begins with."""
    fixed = {f"{each}:{workers - each}": (each, workers - each) for each in range(1, workers)}
    return {_PLANNED: (workers // 2, workers - workers // 2)} | fixed


def play(load: list[Asked], name: str, split: tuple[int, int], *, explain: bool = False) -> Played:
    """One contender under one load, which is left as it is."""
    own = [replace(each) for each in load]
    planner = Planner(_CONFIG) if name == _PLANNED else None
    sim = PlannerSim(_TIMING, split, _TARGETS, planner, _CONFIG.interval_s)
    sim.run(own)
    if explain:
        for plan in sim.plans:
            _print(f"{plan.at_s:7.1f}  {plan.verdict}")
    decisions = [each for plan in sim.plans for each in plan.decisions]
    ttft = [each.ttft_s <= _TARGETS.ttft_s for each in own]
    itl = [each.itl_s <= _TARGETS.itl_s for each in own]
    return Played(
        fmean(first and rest for first, rest in zip(ttft, itl, strict=True)),
        fmean(ttft),
        fmean(itl),
        sum(isinstance(each, SwitchRole) for each in decisions),
    )


def load_maker(arguments: argparse.Namespace, name: str) -> Callable[[float, int], list[Asked]]:
    """What is asked at a load, for a seed. The trace, if there is one, whatever `name`."""
    workers = arguments.workers
    if arguments.trace:
        traces = [Path(path) for path in arguments.trace]
        return lambda load, _: recorded(
            traces, load, arguments.seconds, lambda mix: rate_of(mix, workers, _TIMING, _TARGETS)
        )
    rates = rates_of(workers, _TIMING, _TARGETS)

    def make(load: float, seed: int) -> list[Asked]:
        rng = random.Random(f"{name} {seed}")
        shape = shape_of(name, rng, arguments.seconds)
        scaled = rates[0] * load, rates[1] * load
        return list(arrivals(shape, scaled, arguments.seconds, rng))

    return make


def _rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    shapes = ["trace"] if arguments.trace else arguments.shape or SHAPES
    for name in shapes:
        make = load_maker(arguments, name)
        if arguments.goodput:
            yield _goodput(arguments, name, make)
            continue
        for load in arguments.load:
            yield _attainment(arguments, name, load, make)


def _attainment(
    arguments: argparse.Namespace,
    name: str,
    load: float,
    make: Callable[[float, int], list[Asked]],
) -> dict[str, Any]:
    played: dict[str, list[Played]] = {each: [] for each in contenders(arguments.workers)}
    requests = 0
    for seed in _seeds(arguments):
        asked = make(load, seed)
        requests += len(asked)
        for contender, split in contenders(arguments.workers).items():
            explain = arguments.explain and contender == _PLANNED
            played[contender].append(play(asked, contender, split, explain=explain))
    both = {each: fmean(one.both for one in found) for each, found in played.items()}
    planned = played[_PLANNED]
    minutes = arguments.seeds * arguments.seconds / 60.0
    return {
        "shape": name,
        "load": load,
        "requests": requests,
        **_compared("attainment", both),
        "planner_ttft": round(fmean(one.ttft for one in planned), 4),
        "planner_itl": round(fmean(one.itl for one in planned), 4),
        "switches_per_minute": round(sum(one.switches for one in planned) / minutes, 2),
    }


def _goodput(
    arguments: argparse.Namespace, name: str, make: Callable[[float, int], list[Asked]]
) -> dict[str, Any]:
    def most(contender: str, split: tuple[int, int]) -> float:
        low, high = 0.0, _LOAD_MAX
        for _ in range(_SEARCH_STEPS):
            middle = (low + high) / 2.0
            loads = (make(middle, seed) for seed in _seeds(arguments))
            found = fmean(play(asked, contender, split).both for asked in loads)
            low, high = (middle, high) if found >= arguments.attainment else (low, middle)
        return low

    found = {each: most(each, split) for each, split in contenders(arguments.workers).items()}
    return {"shape": name, "at_attainment": arguments.attainment, **_compared("load", found)}


def _seeds(arguments: argparse.Namespace) -> range:
    return range(arguments.first_seed, arguments.first_seed + arguments.seeds)


def _compared(what: str, found: dict[str, float]) -> dict[str, Any]:
    fixed = {each: value for each, value in found.items() if each != _PLANNED}
    best = max(fixed, key=lambda each: fixed[each])
    gain = found[_PLANNED] / fixed[best] - 1.0 if fixed[best] else None
    return {
        f"planner_{what}": round(found[_PLANNED], 4),
        "best_fixed": best,
        f"best_fixed_{what}": round(fixed[best], 4),
        "gain": None if gain is None else round(gain, 4),
        f"fixed_{what}": {each: round(value, 4) for each, value in fixed.items()},
    }


def main() -> None:
    """Play every shape and print a line for each."""
    arguments = _parse()
    for row in _rows(arguments):
        _print(json.dumps(row) if arguments.json else as_text(row))


def _print(text: str) -> None:
    print(text, flush=True)  # noqa: T201


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.planner")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600.0, help="of each run, simulated")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--load", type=float, nargs="+", default=[0.85, 1.0])
    parser.add_argument("--shape", nargs="+", default=[])
    parser.add_argument("--trace", nargs="+", default=[], help="files, one after the other")
    parser.add_argument("--goodput", action="store_true", help="search the load instead")
    parser.add_argument("--attainment", type=float, default=_CONFIG.attainment, help="of --goodput")
    parser.add_argument("--explain", action="store_true", help="the verdict of every plan")
    return parser.parse_args()


if __name__ == "__main__":
    main()
