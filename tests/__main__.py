"""Every test, in two parts: `python -m tests [arguments of pytest]`, which `make test` runs.

What starts clusters or runs the real model has the machine for itself; all other tests share it,
as many at once as there are cores. Both parts run, and both have to pass.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

PARTS: dict[str, tuple[str, ...]] = {
    # Contiguous halves keep a module's fixtures in one process, until one has run out of tests.
    "shared": ("--numprocesses=logical", "--maxprocesses=4", "--dist=worksteal"),
    "alone": (),
}
_PASSED, _FAILED, _NOTHING_SELECTED = 0, 1, 5
"""Exit codes of pytest. The others mean that tests could not be run."""


def run(arguments: Sequence[str]) -> int:
    """The exit code of pytest for both parts as one."""
    codes = []
    for part, how in PARTS.items():
        codes.append(_run_part(part, [*how, *arguments]))
        if codes[-1] not in (_PASSED, _FAILED, _NOTHING_SELECTED):
            break
    bad = [code for code in codes if code not in (_PASSED, _NOTHING_SELECTED)]
    return bad[0] if bad else min(codes)


def _run_part(part: str, arguments: Sequence[str]) -> int:
    command = [sys.executable, "-m", "pytest", f"--part={part}", "-m", "not slow and not gpu"]
    environment = dict(os.environ)
    if part == "shared":
        # Threads of several processes that wait for one another by spinning take turns.
        environment["OMP_NUM_THREADS"] = "1"
        # The C library fills what is freed: a kernel that reads on there, by address, is found out.
        environment.setdefault("MALLOC_PERTURB_", "165")
    return subprocess.run([*command, *arguments], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
