"""The whole handoff between two processes against raw Gloo between the same two, and its latency.

Contenders take turns in one run, so that a busy machine slows all of them: one Gloo message of the
same bytes, timed at the sink from its word to start to the last byte; a handoff over each
transport, timed from the start of the first gather at the source to the commit at the sink, and
from the grant to the commit. CLOCK_MONOTONIC is one for all processes of a machine. Then handoffs
of which the sink holds everything, against unary gRPC calls. Figures are medians.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.handoff_process import LAYOUT, TRANSPORTS, WAIT_S, Command, run_process

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

MIB = 2**20
PAYLOADS = (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB)
ROUNDS = 9
HITS_PER_ROUND = 20


class _Pair:
    """The two processes, source and sink."""

    def __init__(self, ends: list[Connection]) -> None:
        self._ends = ends
        self._addresses, _ = (_receive(end) for end in ends)

    def ask(self, what: str, tokens: int = 0, transport: str = "") -> tuple[Any, Any]:
        """The answers of source and sink."""
        command = Command(what, tokens, transport, self._addresses)
        for end in self._ends:
            end.send(command)
        source, sink = (_receive(end) for end in self._ends)
        return source, sink

    def stop(self) -> None:
        """Let both end."""
        for end in self._ends:
            end.send(Command("stop"))


def measure(rounds: int) -> Iterator[dict[str, object]]:
    """A record per payload size, then one for the empty handoff."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(2)]
        processes = [
            context.Process(target=run_process, args=(rank, there, str(Path(folder) / "store")))
            for rank, (_, there) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        pair = _Pair([here for here, _ in pipes])
        try:
            for payload_bytes in PAYLOADS:
                yield _measure_size(pair, payload_bytes, rounds)
            yield _measure_empty(pair, rounds)
        finally:
            pair.stop()
            for process in processes:
                process.join(WAIT_S)


def _measure_size(pair: _Pair, size: int, rounds: int) -> dict[str, object]:
    tokens = round(size / LAYOUT.bytes_per_token)
    payload_bytes = tokens * LAYOUT.bytes_per_token
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    # The first round builds the links, touches the memory, and is not counted.
    for turn in range(rounds + 1):
        _, raw_s = pair.ask("raw", tokens)
        taken = {"raw": raw_s}
        for transport in TRANSPORTS:
            gathered_at, (_, granted_at, adopted_at) = pair.ask("handoff", tokens, transport)
            taken[transport] = adopted_at - gathered_at
            taken[f"{transport}_from_grant"] = adopted_at - granted_at
        if turn > 0:
            for what, took_s in taken.items():
                seconds[what].append(took_s)
    rates = {what: payload_bytes / statistics.median(took) for what, took in seconds.items()}
    record: dict[str, object] = {"kind": "transfer", "payload_bytes": payload_bytes}
    record |= {f"{what}_GBps": round(rate / 1e9, 3) for what, rate in rates.items()}
    record |= {
        f"{what}_ratio": round(rate / rates["raw"], 3)
        for what, rate in rates.items()
        if what != "raw"
    }
    return record


def _measure_empty(pair: _Pair, rounds: int) -> dict[str, object]:
    hits_s, calls_s = [], []
    for _ in range(rounds * HITS_PER_ROUND):
        _, (began_at, _, adopted_at) = pair.ask("hit", transport="shared_memory")
        hits_s.append(adopted_at - began_at)
        _, call_s = pair.ask("echo")
        calls_s.append(call_s)
    hit_s, call_s = statistics.median(hits_s), statistics.median(calls_s)
    return {
        "kind": "empty_handoff",
        "handoff_p50_ms": round(1000 * hit_s, 3),
        "unary_call_p50_ms": round(1000 * call_s, 3),
        "round_trips": round(hit_s / call_s, 2),
    }


def _receive(end: Connection) -> Any:
    if not end.poll(WAIT_S):
        raise TimeoutError("a benchmark process does not answer")
    return end.recv()
