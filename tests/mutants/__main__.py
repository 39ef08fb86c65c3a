"""`python -m tests.mutants [--only NAME ...] [--jobs N]`: do the tests notice seeded bugs?

Exit code 1 if a mutant survives or gives no answer, if its tests fail without it, or if the code
that it changes is gone.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from tests.mutants.table import MUTANTS
from tests.mutants.trial import ROOT, Outcome, check_baseline, copy_tree, try_mutant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.mutants.mutant import Mutant


def run(mutants: Sequence[Mutant], jobs: int = 1) -> int:
    """Try each mutant and say what came out; returns the exit code.

    Raises `MutantOutdated`, before anything runs, if the text that one changes is gone.
    """
    with tempfile.TemporaryDirectory(prefix="kvferry-mutants-") as folder:
        # Copied once, so that nobody's edits come between the baseline and a trial.
        pristine = Path(folder) / "pristine"
        copy_tree(ROOT, pristine)
        for mutant in mutants:
            mutant.mutated(pristine)
        failure = check_baseline(mutants, pristine)
        if failure:
            _say(f"without any mutant:\n{failure}")
            return 1
        caught = 0
        with ThreadPoolExecutor(jobs) as pool:
            for verdict in pool.map(lambda m: try_mutant(m, pristine, Path(folder)), mutants):
                _say(str(verdict))
                caught += verdict.outcome is Outcome.CAUGHT
    _say(f"{caught} of {len(mutants)} mutants caught")
    return 0 if caught == len(mutants) else 1


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    """The command line."""
    by_name = {mutant.name: mutant for mutant in MUTANTS}
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", action="append", choices=by_name, metavar="NAME")
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    return run([by_name[name] for name in arguments.only or by_name], arguments.jobs)


if __name__ == "__main__":
    sys.exit(main())
