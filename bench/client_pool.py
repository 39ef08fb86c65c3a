"""Client processes of one node: started, let go at one moment, stopped, and what they saw."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from bench.plan import plan_to_json
from kvferry.errors import DeadlineExceeded, InvalidInput, WorkerUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.plan import RunPlan
    from kvferry.clock import Clock

READY_TIMEOUT_S = 120.0
"""To read the data set, however busy the machine is."""
START_LEAD_S = 0.5
"""From when all are ready to the start, so that the news is everywhere."""
STOP_TIMEOUT_S = 15.0
_LOOK_S = 0.5


@dataclass(slots=True)
class PoolResult:
    """Rows as `Answer.columns` makes them, with the number of the client."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    client_of_row: list[int] = field(default_factory=list)
    interrupted: bool = False
    lost: list[int] = field(default_factory=list)
    """Clients that died; what they sent is in no record."""


class _Client:
    """One process. Its lines come to the queue with its number; None at its end."""

    def __init__(self, number: int, plan: RunPlan, lines: queue.Queue[tuple[int, Any]]) -> None:
        self.number = number
        self.is_over = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.client_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.say(plan_to_json(plan))
        self._reader = threading.Thread(target=self._read, args=(lines,), daemon=True)
        self._reader.start()

    def say(self, line: str) -> None:
        """To one that is gone: nothing happens, its end is in the queue."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def end(self) -> None:
        """Nothing is left of it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                stream.close()

    def _read(self, lines: queue.Queue[tuple[int, Any]]) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            lines.put((self.number, json.loads(line)))
        lines.put((self.number, None))


class ClientPool:
    """Use as a context manager; `run` once."""

    def __init__(self, plan: RunPlan, clients: int, clock: Clock) -> None:
        """`plan` is of this node: its part is split among the clients."""
        self._lines: queue.Queue[tuple[int, Any]] = queue.Queue()
        self._clock = clock
        self._result = PoolResult()
        self._ended = [0] * clients
        self._clients = [
            _Client(number, client_plan(plan, number, clients), self._lines)
            for number in range(clients)
        ]

    def __enter__(self) -> ClientPool:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients:
            client.end()

    def wait_ready(self) -> int:
        """Until all know what to send; returns how many requests that is together.

        Raises `InvalidInput` of the plan, `WorkerUnavailable` and `DeadlineExceeded`.
        """
        deadline = self._clock.now() + READY_TIMEOUT_S
        requests, ready = 0, 0
        while ready < len(self._clients):
            if self._clock.now() > deadline:
                raise DeadlineExceeded(f"a client was not ready after {READY_TIMEOUT_S:g} s")
            with contextlib.suppress(queue.Empty):
                number, message = self._lines.get(timeout=_LOOK_S)
                if message is None:
                    raise WorkerUnavailable(f"client {number} died before the start")
                if "problem" in message:
                    raise InvalidInput(*message["problem"])
                requests += message["ready"]
                ready += 1
        return requests

    def run(self, start_at: float, progress: Callable[[int], None]) -> PoolResult:
        """From the clock's time `start_at` until all have ended. Ctrl-C ends it well: what came
        until then is the result, marked so."""
        for client in self._clients:
            client.say(repr(start_at))
        try:
            while not self._is_over():
                self._look(progress)
        except KeyboardInterrupt:
            self._result.interrupted = True
            self._stop(progress)
        return self._result

    def _is_over(self) -> bool:
        return all(client.is_over for client in self._clients)

    def _stop(self, progress: Callable[[int], None]) -> None:
        for client in self._clients:
            client.say("stop")
        deadline = self._clock.now() + STOP_TIMEOUT_S
        while not self._is_over() and self._clock.now() < deadline:
            self._look(progress)
        self._result.lost += [client.number for client in self._clients if not client.is_over]

    def _look(self, progress: Callable[[int], None]) -> None:
        try:
            number, message = self._lines.get(timeout=_LOOK_S)
        except queue.Empty:
            return
        client = self._clients[number]
        if message is None:
            if not client.is_over:
                self._result.lost.append(number)
            client.is_over = True
        elif "ended" in message:
            progress(message["ended"] - self._ended[number])
            self._ended[number] = message["ended"]
        elif "requests" in message:
            self._result.rows += message["requests"]
            self._result.client_of_row += [number] * len(message["requests"])
            client.is_over = True


def client_plan(plan: RunPlan, number: int, clients: int) -> RunPlan:
    """Of one client of a node: the parts of all nodes are split in the same way."""
    return replace(plan, part=plan.part * clients + number, parts=plan.parts * clients)
