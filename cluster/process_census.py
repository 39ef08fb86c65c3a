"""Which processes of this machine belong to a cluster, and making sure that none is left.

Every process of a cluster (Ray's own and our actors) writes its output to files in the cluster's
directory or names it in its command line; that holds for orphans too, whose parent is gone.
Linux keeps both in /proc.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """A live process. `started` (clock ticks since boot) tells it from a later one of its pid."""

    pid: int
    started: int
    name: str


def processes_of(directory: Path) -> list[ProcessEntry]:
    """Live processes with an open file or an argument below `directory`; never this one."""
    found = []
    for entry in _PROC.iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        # A process may end while we look at it, or belong to somebody else.
        with contextlib.suppress(OSError):
            if _mentions(entry, str(directory)):
                found.append(_read_entry(entry))
    return sorted(found, key=lambda process: process.pid)


def kill_all(processes: list[ProcessEntry]) -> None:
    """SIGKILL to each that is still the process it was."""
    for process in processes:
        with contextlib.suppress(OSError):
            if _read_entry(_PROC / str(process.pid)) == process:
                os.kill(process.pid, signal.SIGKILL)


def _mentions(entry: Path, directory: str) -> bool:
    # A zombie has neither files nor arguments: it has ended, whatever its parent does.
    if directory in entry.joinpath("cmdline").read_bytes().decode(errors="replace"):
        return True
    return any(
        os.readlink(file).startswith(f"{directory}/") for file in entry.joinpath("fd").iterdir()
    )


def _read_entry(entry: Path) -> ProcessEntry:
    # The name in parentheses may contain anything; the fields after it are numbers.
    head, _, tail = entry.joinpath("stat").read_text(encoding="utf-8").rpartition(")")
    return ProcessEntry(int(entry.name), int(tail.split()[19]), head.partition("(")[2])
