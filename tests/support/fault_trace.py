"""Reads the trace files of a cluster's workers while they are written."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.clock import MonotonicClock

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One change of state, in the file of one worker."""

    worker_id: str
    at_s: float
    side: str
    handoff: str
    """`<request id>#<attempt>`."""
    state: str


class TraceTail:
    """Lines written after this object was made."""

    def __init__(self, trace_file: Path) -> None:
        self._trace_file = trace_file
        self._read_to: dict[Path, int] = {file: file.stat().st_size for file in self._files()}
        self._workers: dict[tuple[str, str], str] = {}

    def wait_for(self, side: str, state: str, within_s: float) -> TraceLine:
        """The first new line of that side and state."""
        return self._wait(
            lambda line: (line.side, line.state) == (side, state), within_s, f"{side} {state}"
        )

    def worker_of(self, handoff: str, side: str, within_s: float) -> str:
        """The worker that is this side of a handoff. Handoffs that began before are not known."""
        found = self._workers.get((handoff, side))
        if found is not None:
            return found
        return self._wait(
            lambda line: (line.handoff, line.side) == (handoff, side), within_s, f"{side} {handoff}"
        ).worker_id

    def _wait(self, wanted: Callable[[TraceLine], bool], within_s: float, what: str) -> TraceLine:
        clock = MonotonicClock()
        deadline = clock.now() + within_s
        while clock.now() < deadline:
            for line in self._new_lines():
                if wanted(line):
                    return line
            time.sleep(_POLL_S)
        raise AssertionError(f"not traced within {within_s} s: {what}")

    def _new_lines(self) -> list[TraceLine]:
        found: list[TraceLine] = []
        for file in self._files():
            with file.open("rb") as stream:
                stream.seek(self._read_to.get(file, 0))
                text = stream.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read_to[file] = self._read_to.get(file, 0) + len(whole)
            worker_id = file.name.removeprefix(f"{self._trace_file.name}.")
            found += [_parse(worker_id, line) for line in whole.decode().splitlines()]
        for line in found:
            self._workers[line.handoff, line.side] = line.worker_id
        return sorted(found, key=lambda line: line.at_s)

    def _files(self) -> list[Path]:
        return sorted(self._trace_file.parent.glob(f"{self._trace_file.name}.*"))


def _parse(worker_id: str, line: str) -> TraceLine:
    at_s, side, handoff, state = line.split()
    return TraceLine(worker_id, float(at_s), side, handoff, state)
