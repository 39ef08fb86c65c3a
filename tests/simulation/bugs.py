"""Whether the simulator finds seeded bugs: a copy of the tree, one edit, runs until one fails."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.mutants.trial import ROOT, copy_tree

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.mutants.mutant import Mutant

RUNS_MAX = 3000
"""A bug that so many runs do not find is not found."""
TIMEOUT_S = 3000.0


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of one seeded bug."""

    mutant: Mutant
    runs: int | None
    """The run that found it; None if none did."""
    what: str
    """The property that broke."""

    def __str__(self) -> str:
        found = "NOT FOUND" if self.runs is None else f"found in run {self.runs}"
        return f"{self.mutant.name}: {found}: {self.what}"


def find_all(mutants: Iterable[Mutant], runs_max: int = RUNS_MAX) -> Iterator[Finding]:
    """Try each; the first must be found in a tree that is otherwise this one."""
    with tempfile.TemporaryDirectory(prefix="kvferry-bugs-") as folder:
        pristine = Path(folder) / "pristine"
        copy_tree(ROOT, pristine)
        for mutant in mutants:
            yield _find(mutant, pristine, Path(folder) / mutant.name, runs_max)


def _find(mutant: Mutant, pristine: Path, tree: Path, runs_max: int) -> Finding:
    shutil.copytree(pristine, tree)
    (tree / mutant.file).write_text(mutant.mutated(pristine), encoding="utf-8")
    command = [sys.executable, "-m", "tests.simulation", "--runs", str(runs_max), "--stop"]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tree)}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, timeout=TIMEOUT_S, capture_output=True, text=True
        )
        output = done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        output = f"no end within {TIMEOUT_S:g} s"
    shutil.rmtree(tree)
    found = re.search(r"^(\d+) runs, 1 violations", output, re.MULTILINE)
    what = re.search(r"^seed \d+: (.*)$", output, re.MULTILINE)
    if found is None or what is None:
        return Finding(mutant, None, output[-1000:])
    return Finding(mutant, int(found[1]), what[1][:100])
