"""How long a process of this engine takes from its start to its first token."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

from kvferry.clock import MonotonicClock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_WITHIN_S = 600.0


def kvferry_ready(directory: Path, threads: int) -> Iterator[tuple[bool, float]]:
    """(False, seconds) of a first start ever, then (True, seconds) of the next one.

    What Numba compiled is the whole difference, so it gets an empty directory for it.
    """
    clock = MonotonicClock()
    with tempfile.TemporaryDirectory() as kernels:
        for compiled_before in (False, True):
            began = clock.now()
            subprocess.run(
                [sys.executable, "-m", "benchmarks.first_token", str(directory), str(threads)],
                env=dict(os.environ) | {"NUMBA_CACHE_DIR": kernels},
                stdout=subprocess.DEVNULL,
                check=True,
                timeout=_WITHIN_S,
            )
            yield compiled_before, clock.now() - began
