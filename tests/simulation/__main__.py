"""`python -m tests.simulation [--seed N] [--runs K] [--returns] [--stop]
[--exhaustive DEPTH] [--bugs]`.

Seeded runs from `--seed` on, every interleaving of a small world up to a depth, or a search for
each seeded bug. A run that fails prints its moves and the command that replays it. Exit code 1 if
anything fails.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections import Counter
from typing import TYPE_CHECKING

from kvferry.clock import MonotonicClock
from tests.mutants.protocol_mutants import PROTOCOL_MUTANTS
from tests.simulation.bugs import find_all
from tests.support.sim_explore import Explorer
from tests.support.sim_returns import ReturningRun
from tests.support.sim_run import SimRun

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

_SHOWN = 40
"""Last moves of a run that failed."""


def failure(seed: int, happened: Counter[str], kind: type[SimRun] = SimRun) -> str:
    """Run one seed; empty if every property held, else what broke and how to see it again."""
    run = kind(seed)
    try:
        run.run()
    except Exception as error:  # noqa: BLE001  # whatever it is, it is this run's failure
        where = "".join(traceback.format_tb(error.__traceback__, -3))
        return (
            f"seed {seed}: {type(error).__name__}: {error}\n{where}"
            f"the last of {len(run.trace)} moves: {' | '.join(run.trace[-_SHOWN:])}\n"
            f"replay: python -m tests.simulation --seed {seed} --verbose"
            f"{' --returns' if kind is ReturningRun else ''}"
        )
    happened += run.happened
    return ""


def run_seeds(seeds: Iterable[int], kind: type[SimRun], *, stop: bool) -> int:
    """Run them all, or until one fails; returns how many failed."""
    happened: Counter[str] = Counter()
    failed = runs = 0
    clock = MonotonicClock()
    started = clock.now()
    for seed in seeds:
        runs += 1
        problem = failure(seed, happened, kind)
        if problem:
            failed += 1
            _say(problem)
            if stop:
                break
        if runs % 10_000 == 0:
            _say(f"{runs} runs, {failed} violations, {clock.now() - started:.0f} s")
    _say(f"{runs} runs, {failed} violations, {clock.now() - started:.1f} s")
    for name in ("sink_adopted", "sink_aborted", "source_closed", "source_aborted"):
        _say(f"  {name}: {happened[name]}")
    moves = sorted((name, count) for name, count in happened.items() if name.startswith("move "))
    _say("  " + ", ".join(f"{name[5:]} {count}" for name, count in moves))
    return failed


def explore(depth: int) -> int:
    """Every interleaving of the small worlds up to `depth`; returns how many of them failed."""
    failed = 0
    for explorer in Explorer.worlds(depth):
        problem = explorer.run()
        _say(explorer.summary())
        if problem:
            failed += 1
            _say(problem)
    return failed


def find_bugs(names: Collection[str]) -> int:
    """Look for seeded bugs; 1 if one is not found."""
    chosen = [mutant for mutant in PROTOCOL_MUTANTS if not names or mutant.name in names]
    found = 0
    for finding in find_all(chosen):
        _say(str(finding))
        found += finding.runs is not None
    _say(f"{found} of {len(chosen)} seeded bugs found")
    return 0 if found == len(chosen) else 1


def replay(seed: int, kind: type[SimRun]) -> int:
    """One run with everything that was said."""
    run = kind(seed)
    run.world.log = []
    try:
        run.run()
    except Exception:  # noqa: BLE001  # shown, and counted
        _say("\n".join(run.world.log))
        _say(traceback.format_exc())
        return 1
    _say("\n".join(run.world.log))
    return 0


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--returns", action="store_true", help="KV goes back as well")
    parser.add_argument("--exhaustive", type=int, metavar="DEPTH", default=0)
    parser.add_argument("--stop", action="store_true", help="at the first run that fails")
    parser.add_argument(
        "--bugs", nargs="*", metavar="NAME", help="seeded bugs; all if none is named"
    )
    parser.add_argument("--verbose", action="store_true", help="one seed, with all that is said")
    arguments = parser.parse_args()
    if arguments.exhaustive:
        return min(1, explore(arguments.exhaustive))
    if arguments.bugs is not None:
        return find_bugs(arguments.bugs)
    kind = ReturningRun if arguments.returns else SimRun
    if arguments.verbose:
        return replay(arguments.seed, kind)
    seeds = range(arguments.seed, arguments.seed + arguments.runs)
    return min(1, run_seeds(seeds, kind, stop=arguments.stop))


if __name__ == "__main__":
    sys.exit(main())
