"""Routing policies on a recorded trace: the product's policies on simulated workers.

    python -m benchmarks.router --trace PATH --workers 16 --policy all --seed 1 --json
    python -m benchmarks.router --trace PATH --workers 16 --policy all --goodput 0.5 --json

One JSON object per policy and line: {"trace", "workers", "policy", "hit_rate", "work_max_mean",
"ttft_p50_s", "ttft_p90_s", "ttft_p99_s"}; with `--goodput LIMIT_S` {"trace", "workers", "policy",
"limit_s", "load", "goodput_tok_s_worker"}: most prompt tokens/s and worker offered with the p90 of
TTFT within the limit, and the load that this is. Ours is searched first, from `--load` on; another
one only if it holds the limit above the best so far, else it has "below_tok_s_worker" instead.
"at_least_tok_s_worker": the limit is held even at the highest load, in `benchmarks.goodput`.

The model is in `benchmarks.replay`, the formats in `bench.traces`. With `--routers K`
each of K routers knows its own dispatches at once and those of the others `--event-delay-s` late.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from bench.traces import read_trace
from benchmarks.goodput import HIGHEST_RUNG, LOWEST_RUNG, GoodputSearch, load_of
from benchmarks.replay import Replay, ReplayResult, ReplaySettings, Workload
from kvferry.router_config import PolicyName
from router.policies.approximate_tree import approximate_tree_tight
from router.policies.catalogue import POLICIES, Policy
from router.policies.consistent_hashing import consistent_hashing, session_hashing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

OURS = PolicyName.PRICED_TIME.value
CONTENDERS: dict[str, Policy] = {
    **{name.value: policy for name, policy in POLICIES.items()},
    "consistent_hashing_unbounded": Policy(consistent_hashing),
    "session_hashing": Policy(session_hashing),
    "approximate_tree_tight": Policy(approximate_tree_tight, reads_sent=True),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the policies asked for."""
    parsed = _parse(arguments)
    workload = Workload(read_trace(parsed.trace, parsed.seed))
    settings = ReplaySettings(
        workers=parsed.workers,
        seed=parsed.seed,
        load=parsed.load,
        routers=parsed.routers,
        event_delay_s=parsed.event_delay_s,
    )
    names = sorted(CONTENDERS, key=OURS.__ne__) if parsed.policy == "all" else [parsed.policy]
    rows = (
        _figures_of(names, workload, settings)
        if parsed.goodput is None
        else _goodput_of(names, workload, settings, parsed.goodput)
    )
    head = {"trace": workload.trace.name, "workers": parsed.workers}
    for row in rows:
        _report(head | row, as_json=parsed.json)
    return 0


def _figures_of(
    names: list[str], workload: Workload, settings: ReplaySettings
) -> Iterator[dict[str, object]]:
    for name in names:
        result = Replay(workload, CONTENDERS[name], settings).run()
        yield {"policy": name, **figures(result)}


def _goodput_of(
    names: list[str], workload: Workload, settings: ReplaySettings, limit_s: float
) -> Iterator[dict[str, object]]:
    """The first policy is searched, the others only above the best so far."""
    best: int | None = None
    for name in names:
        search = GoodputSearch(workload, CONTENDERS[name], settings, limit_s)
        found = search.highest() if best is None else search.highest_beyond(best)
        if found is None:
            kind, shown = "below", LOWEST_RUNG if best is None else best + 1
        else:
            kind, shown = "at_least" if found == HIGHEST_RUNG else "goodput", found
            best = found
        yield {
            "policy": name,
            "limit_s": limit_s,
            "load": round(load_of(shown), 4),
            f"{kind}_tok_s_worker": round(workload.offered_tok_s_worker(load_of(shown))),
        }


def figures(result: ReplayResult) -> dict[str, float]:
    """Of one run, rounded."""
    return {
        "hit_rate": round(result.hit_rate, 4),
        "work_max_mean": round(result.work_max_mean, 3),
        "ttft_p50_s": round(result.quantile_s(0.5), 4),
        "ttft_p90_s": round(result.quantile_s(0.9), 4),
        "ttft_p99_s": round(result.quantile_s(0.99), 4),
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--trace", type=Path, required=True, help="in any of the known formats")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--policy", choices=["all", *CONTENDERS], default="all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--load", type=float, default=0.5, help="of a perfect cache; see replay")
    parser.add_argument("--goodput", type=float, metavar="LIMIT_S")
    parser.add_argument("--routers", type=int, default=1)
    parser.add_argument("--event-delay-s", type=float, default=0.1)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def _report(row: dict[str, object], *, as_json: bool) -> None:
    line = json.dumps(row) if as_json else "  ".join(f"{key} {row[key]}" for key in row)
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
