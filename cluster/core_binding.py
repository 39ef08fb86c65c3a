"""Keeps a process on cores of its own.

Two workers that compute all the time are worth one core each, but the system moves them about to
make room for all that runs for moments beside them, and then one waits behind a slice of the other.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

_THREADS = Path("/proc/self/task")


def bind_process(cores: AbstractSet[int]) -> None:
    """Let every thread of this process, and all that it will start, run on `cores` only.

    Raises `ValueError` when this process may not run on one of them.
    """
    allowed = os.sched_getaffinity(0)
    if missing := cores - allowed:
        raise ValueError(f"there is no core {_text(missing)} here, only {_text(allowed)}")
    bound: set[int] = set()
    # A thread that is not bound yet may start another one meanwhile, which is not bound either.
    while started := _threads() - bound:
        for thread in started:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.sched_setaffinity(thread, cores)
        bound |= started


def _threads() -> set[int]:
    return {int(entry.name) for entry in _THREADS.iterdir()}


def _text(cores: AbstractSet[int]) -> str:
    return ", ".join(str(core) for core in sorted(cores))
