"""What the processes of a cluster use of the machine, sampled while a load runs."""

from __future__ import annotations

import os
import statistics
import threading
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.process_census import processes_of
from kvferry.clock import MonotonicClock

if TYPE_CHECKING:
    from cluster.process_census import ProcessEntry

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Sample:
    """One process at one moment."""

    at_s: float
    """Since the watch began."""
    resident_bytes: int
    threads: int
    descriptors: int


@dataclass(frozen=True, slots=True)
class Growth:
    """One figure of one process, in two windows of time."""

    process: str
    figure: str
    early: float
    late: float


class ProcessWatch:
    """Samples all processes of a cluster in a thread of its own. A context manager."""

    def __init__(self, directory: Path, interval_s: float) -> None:
        """`directory`: of the cluster."""
        self._directory = directory
        self._interval_s = interval_s
        self._clock = MonotonicClock()
        self._samples: dict[ProcessEntry, list[Sample]] = defaultdict(list)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> ProcessWatch:
        self._began = self._clock.now()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def growths(self, early: tuple[float, float], late: tuple[float, float]) -> list[Growth]:
        """For each process that lived in both windows (seconds since the watch began).

        Memory and threads by their medians, which a short burst does not move. Descriptors too: a
        connection that comes and goes is none that leaks.
        """
        return [
            Growth(f"{process.name} ({process.pid})", figure, before, after)
            for process, samples in self._samples.items()
            for figure in ("resident_bytes", "threads", "descriptors")
            if (before := _median(samples, figure, early)) is not None
            and (after := _median(samples, figure, late)) is not None
        ]

    def _watch(self) -> None:
        while not self._stopping.wait(self._interval_s):
            at_s = self._clock.now() - self._began
            for process in processes_of(self._directory):
                sample = _sample(process.pid, at_s)
                if sample is not None:
                    self._samples[process].append(sample)


def _sample(pid: int, at_s: float) -> Sample | None:
    """None: it has ended."""
    entry = Path("/proc") / str(pid)
    try:
        pages = int((entry / "statm").read_text(encoding="ascii").split()[1])
        threads = sum(1 for _ in (entry / "task").iterdir())
        descriptors = sum(1 for _ in (entry / "fd").iterdir())
    except OSError:
        return None
    return Sample(at_s, pages * _PAGE_BYTES, threads, descriptors)


def _median(samples: list[Sample], figure: str, window: tuple[float, float]) -> float | None:
    read = {
        "resident_bytes": lambda sample: sample.resident_bytes,
        "threads": lambda sample: sample.threads,
        "descriptors": lambda sample: sample.descriptors,
    }[figure]
    values = [read(sample) for sample in samples if window[0] <= sample.at_s < window[1]]
    return statistics.median(values) if values else None
