"""Which processes of this machine belong to a cluster, and making sure that none is left.

Every process of a cluster (Ray's own and our actors) carries a mark in its environment: the
cluster's directory, under the name `MARK`. It is inherited, so orphans have it too, whose parent is
gone; whoever merely reads a log or names the directory has not. Linux shows it in /proc.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

MARK = "_KVFERRY_CLUSTER_DIRECTORY"
"""Not `KVFERRY_...`, which would be a setting."""

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """A live process. `started` (clock ticks since boot) tells it from a later one of its pid."""

    pid: int
    started: int
    name: str


def processes_of(directory: Path) -> list[ProcessEntry]:
    """Live processes that were started with the mark of `directory`; never this one."""
    mark = f"{MARK}={directory}".encode()
    found = []
    for entry in _PROC.iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        # A process may end while we look at it, or belong to somebody else. A zombie has no
        # environment: it has ended, whatever its parent does.
        with contextlib.suppress(OSError):
            if mark in entry.joinpath("environ").read_bytes().split(b"\0"):
                found.append(_read_entry(entry))
    return sorted(found, key=lambda process: process.pid)


def kill_all(processes: list[ProcessEntry]) -> None:
    """SIGKILL to each that is still the process it was."""
    for process in processes:
        with contextlib.suppress(OSError):
            if _read_entry(_PROC / str(process.pid)) == process:
                os.kill(process.pid, signal.SIGKILL)


def _read_entry(entry: Path) -> ProcessEntry:
    # The name in parentheses may contain anything; the fields after it are numbers.
    head, _, tail = entry.joinpath("stat").read_text(encoding="utf-8").rpartition(")")
    return ProcessEntry(int(entry.name), int(tail.split()[19]), head.partition("(")[2])
