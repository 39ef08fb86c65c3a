"""The planner against every fixed ratio of as many workers, in simulated time.

    python -m benchmarks.planner --json [--workers 8] [--seconds 600] [--seeds 3] [--load 0.85]
                                        [--shape square-120 ...]

SLO attainment is the share of all requests that kept both targets: TTFT, and the mean time between
two tokens. All contenders of a seed get the same requests at the same moments, so that relative
attainment is relative goodput (requests within the SLO per second).
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from benchmarks.command_line import as_text
from benchmarks.planner_load import (
    ANSWERS,
    PROMPTS,
    Asked,
    Mix,
    arrivals,
    erratic,
    sine,
    square,
    steady,
)
from benchmarks.planner_sim import PlannerSim, Timing
from cluster.planner import Planner, SwitchRole
from cluster.planner_capacity import DecodeCapacity, PromptCapacity, Targets
from cluster.planner_demand import Demand
from kvferry.planner_config import PlannerConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.planner_load import Shape

_TIMING = Timing()
_CONFIG = PlannerConfig(ttft_s=2.0, itl_ms=25.0)
_SHAPES = ("square-60", "square-120", "square-300", "sine-120", "sine-300", "erratic-60",
           "steady-0", "steady-0.5", "steady-1")


def _shape(name: str, rng: random.Random, seconds: float) -> Shape:
    kind, _, number = name.partition("-")
    match kind:
        case "square":
            return square(float(number))
        case "sine":
            return sine(float(number))
        case "steady":
            return steady(float(number))
        case "erratic":
            return erratic(float(number), rng, seconds)
    raise ValueError(f"{name} is no shape")


def _demand(mix: Mix, per_s: float) -> Demand:
    return Demand(
        per_s * mix.prompt, mix.prompt, 0.284, per_s * mix.answer, mix.answer, 0.0, 0.0
    )


def _rate(mix: Mix, workers: int) -> float:
    """Requests per second that the best split of the workers just holds the targets for."""
    targets = Targets(_CONFIG.ttft_s, _CONFIG.itl_ms / 1000.0, _CONFIG.attainment)
    context = mix.prompt + mix.answer / 2.0
    line = (_TIMING.step_s, _TIMING.sequence_s + _TIMING.context_token_s * context)
    prompts = PromptCapacity(1.0 / _TIMING.prompt_token_s)
    answers = DecodeCapacity.of(line, _TIMING.running_max, targets)

    def load(per_s: float) -> float:
        demand = _demand(mix, per_s)
        return min(
            max(prompts.load(demand, each, targets), answers.load(demand, workers - each, targets))
            for each in range(1, workers)
        )

    low, high = 0.0, 1e4
    for _ in range(50):
        middle = (low + high) / 2.0
        low, high = (middle, high) if load(middle) <= 1.0 else (low, middle)
    return low


def _attainment(load: list[Asked]) -> tuple[float, float, float]:
    """Of both targets, of TTFT, of ITL."""
    ttft = [each.ttft_s <= _CONFIG.ttft_s for each in load]
    itl = [each.itl_s <= _CONFIG.itl_ms / 1000.0 for each in load]
    return (
        fmean(a and b for a, b in zip(ttft, itl, strict=True)),
        fmean(ttft),
        fmean(itl),
    )


def _play(load: list[Asked], split: tuple[int, int], seed: int, planner: Planner | None) -> Any:
    own = [replace(each) for each in load]
    sim = PlannerSim(
        _TIMING, split, seed, planner, _CONFIG.interval_s,
        (_CONFIG.ttft_s, _CONFIG.itl_ms / 1000.0), _CONFIG.ttft_s,
    )
    sim.run(own)
    return _attainment(own), sim


def _rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    workers = arguments.workers
    rates = _rate(PROMPTS, workers) * arguments.load, _rate(ANSWERS, workers) * arguments.load
    for name in arguments.shape or _SHAPES:
        fixed: dict[int, list[float]] = {each: [] for each in range(1, workers)}
        planned, switches, requests = [], 0, 0
        parts = []
        for seed in range(arguments.seeds):
            rng = random.Random(f"{name} {seed}")
            shape = _shape(name, rng, arguments.seconds)
            load = list(arrivals(shape, rates, arguments.seconds, rng))
            requests += len(load)
            for prefill, found in fixed.items():
                found.append(_play(load, (prefill, workers - prefill), seed, None)[0][0])
            half = workers // 2
            planner = Planner(_CONFIG)
            (both, *each), sim = _play(load, (half, workers - half), seed, planner)
            planned.append(both)
            parts.append(each)
            switches += sum(
                isinstance(one, SwitchRole) for plan in sim.plans for one in plan.decisions
            )
            if arguments.explain:
                for plan in sim.plans:
                    print(f"{plan.at_s:6.1f} {plan.verdict}"
                          f" {[d.worker_id for d in plan.decisions]}")
        of_ratio = {f"{each}:{workers - each}": fmean(found) for each, found in fixed.items()}
        best = max(of_ratio, key=lambda ratio: of_ratio[ratio])
        yield {
            "shape": name,
            "requests": requests,
            "planner": round(fmean(planned), 4),
            "ttft": round(fmean(p[0] for p in parts), 4),
            "itl": round(fmean(p[1] for p in parts), 4),
            "best_fixed": best,
            "best_fixed_attainment": round(of_ratio[best], 4),
            "gain": round(fmean(planned) / of_ratio[best] - 1.0, 4),
            "switches_per_minute": round(
                switches / arguments.seeds / arguments.seconds * 60.0, 2
            ),
            "fixed": {ratio: round(value, 4) for ratio, value in of_ratio.items()},
        }


def main() -> None:
    """Play every shape and print a line for each."""
    arguments = _parse()
    for row in _rows(arguments):
        print(json.dumps(row) if arguments.json else as_text(row), flush=True)  # noqa: T201


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.planner", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600.0, help="of each run, simulated")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--load", type=float, default=0.85, help="of what the best split holds")
    parser.add_argument("--shape", nargs="+", default=[])
    parser.add_argument("--explain", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
