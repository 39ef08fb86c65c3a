"""Whether the tests notice a mutant: a copy of the source tree, one edit, one run of pytest."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.clock import MonotonicClock

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from tests.mutants.mutant import Mutant

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120.0
"""For each file of tests in a run; a mutant should die within 10 s on an idle machine."""
_COPIED = (
    *("kvferry", "mem_cache", "kv_transfer", "engine", "router", "prefill_worker"),
    *("decode_worker", "cluster", "tests", "docs", "pyproject.toml", "kvferry.yaml"),
)
_PASSED, _FAILED = 0, 1
"""Exit codes of pytest. The others mean that tests could not be run."""


class Outcome(Enum):
    """What a run of tests said about a mutant."""

    CAUGHT = "caught"
    SURVIVED = "SURVIVED"
    NO_ANSWER = "NO ANSWER"
    """The tests could not be collected or did not end in time: that catches nothing."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one mutant's trial."""

    mutant: Mutant
    outcome: Outcome
    seconds: float
    detail: str
    """The test that failed; the end of pytest's output if there was no answer."""

    def __str__(self) -> str:
        return f"{self.outcome.value:9} {self.seconds:5.1f} s  {self.mutant.name}: {self.detail}"


@dataclass(frozen=True, slots=True)
class _Run:
    exit_code: int
    output: str
    seconds: float


def copy_tree(source: Path, target: Path) -> None:
    """Copy what tests need. No bytecode: it would outlive an edit within the same second."""
    target.mkdir()
    for name in _COPIED:
        if (source / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source / name, target / name, ignore=ignored)
        else:
            shutil.copy(source / name, target / name)


def try_mutant(mutant: Mutant, pristine: Path, scratch: Path) -> Verdict:
    """Run the mutant's tests against a copy of `pristine` with the edit, made in `scratch`."""
    tree = scratch / mutant.name
    copy_tree(pristine, tree)
    (tree / mutant.file).write_text(mutant.mutated(pristine), encoding="utf-8")
    run = _run_tests(tree, mutant.tests)
    shutil.rmtree(tree)
    if run.exit_code == _PASSED:
        return Verdict(mutant, Outcome.SURVIVED, run.seconds, mutant.breaks)
    failed = re.search(r"^(?:FAILED|ERROR) \S+?([^/\s]+::\S+)", run.output, re.MULTILINE)
    if run.exit_code == _FAILED and failed is not None:
        return Verdict(mutant, Outcome.CAUGHT, run.seconds, failed[1])
    return Verdict(mutant, Outcome.NO_ANSWER, run.seconds, run.output[-2000:])


def check_baseline(mutants: Iterable[Mutant], pristine: Path) -> str:
    """Run all tests that the mutants name, without any edit; pytest's output if one fails."""
    tests = dict.fromkeys(test for mutant in mutants for test in mutant.tests)
    run = _run_tests(pristine, tests)
    return "" if run.exit_code == _PASSED else run.output[-4000:]


def _run_tests(tree: Path, tests: Collection[str]) -> _Run:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["--tb=line", "-m", "not slow and not gpu", *tests]
    # Hypothesis always with the same examples: a verdict must not depend on luck.
    environment = os.environ | {"HYPOTHESIS_PROFILE": "ci", "PYTHONDONTWRITEBYTECODE": "1"}
    clock, timeout_s = MonotonicClock(), TIMEOUT_S * len(tests)
    started = clock.now()
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, timeout=timeout_s, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired:
        return _Run(-1, f"no end within {timeout_s:g} s", clock.now() - started)
    return _Run(done.returncode, done.stdout + done.stderr, clock.now() - started)
