"""One fault under load, and what must hold after it."""

from __future__ import annotations

import contextlib
import functools
import random
import signal
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.clock import MonotonicClock
from kvferry.limits import (
    ATTEMPTS_MAX,
    SESSION_CONNECT_TIMEOUT_S,
    WORKER_STATUS_FAILURES_MAX,
    WORKER_STATUS_TIMEOUT_S,
)
from kvferry.membership import Role
from tests.support.fault_load import Load, ask, digest_question, growing_question
from tests.support.fault_model import LINK_TIMEOUT_S, STATUS_INTERVAL_S
from tests.support.fault_plan import LONG_S, PRESSED, RULES, Aim, Blow, Fault
from tests.support.fault_trace import TraceTail

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.fault_cluster import FaultCluster, WorkerHandle
    from tests.support.fault_load import Outcome
    from tests.support.fault_worker import Held

SESSION_SILENCE_S = 6.0
"""A keepalive ping every 2 s that has to be answered within 4 s."""
ROUTER_PATIENCE_S = WORKER_STATUS_FAILURES_MAX * (WORKER_STATUS_TIMEOUT_S + STATUS_INTERVAL_S)
BUSY_MACHINE_S = 15.0
"""For computing and waiting for room, on two cores that are shared."""
END_WITHIN_S = BUSY_MACHINE_S + ATTEMPTS_MAX * (
    SESSION_CONNECT_TIMEOUT_S + max(SESSION_SILENCE_S, ROUTER_PATIENCE_S, LINK_TIMEOUT_S)
)
"""A request's longest way to its end: each attempt meets the silent worker anew."""
MOMENT_S = 80.0
"""For a handoff to come to the wanted state."""
ROOM_S = MOMENT_S
"""More of it where prefill workers are held back all the while, so that room runs out."""
IDLE_WITHIN_S = LINK_TIMEOUT_S + 20.0 + BUSY_MACHINE_S
"""The longest state that holds slots without progress: the source that waits for its receipt."""
WHOLE_WITHIN_S = 30.0
NEWCOMER_S = 20.0
"""In which one request is served although the fault lasts; a busy machine may need it."""
GIVE_UP_S = 10.0
"""When a worker that is cut off for good is replaced."""

NOTICED_S = WORKER_STATUS_TIMEOUT_S + 1.0
"""The router has seen that the worker does not answer, and sends it nothing new."""

CLIENTS, PRESSING_CLIENTS = 8, 14
_PEER_S = 2.0
_DECODING_S = 0.05
_AFTERWARDS_S = 0.5
_POLL_S = 0.001
_SLOW_S = 1.5


@dataclass(frozen=True, slots=True)
class Report:
    """What an episode saw."""

    outcomes: list[Outcome]
    problems: list[str]
    served_meanwhile: int
    """Right answers begun after the blow, and ended before its end."""

    def counts(self) -> dict[str, object]:
        """For the record of the test."""
        ends = [outcome.code for outcome in self.outcomes]
        return {
            "requests": len(ends),
            "unavailable": ends.count("UNAVAILABLE"),
            "unavailable_before_first_token": sum(
                outcome.code == "UNAVAILABLE" and not outcome.tokens for outcome in self.outcomes
            ),
            "longest_s": round(max(outcome.took_s for outcome in self.outcomes), 2),
            "served_meanwhile": self.served_meanwhile,
        }


@dataclass(frozen=True, slots=True)
class _Pair:
    """The two workers of the handoff that is struck; `held` stands still, if one does."""

    source: WorkerHandle
    sink: WorkerHandle
    held: WorkerHandle | None

    def of(self, side: str) -> WorkerHandle:
        return self.source if side == "source" else self.sink


def run_episode(cluster: FaultCluster, fault: Fault, trace_file: Path, seed: int) -> Report:
    """Load, the blow, its end; then everybody must be whole, idle and in order."""
    clock = MonotonicClock()
    room_s = ROOM_S if fault.state in PRESSED else 0.0
    load = Load(cluster.address, _questions(fault, seed), END_WITHIN_S + room_s)
    tail = TraceTail(trace_file)
    load.start()
    pressed = _SlowPrefill(cluster) if fault.state in PRESSED else contextlib.nullcontext()
    try:
        with pressed:
            pair = _wait_for_moment(cluster, fault, tail)
        struck_at = clock.now()
        _strike(cluster, fault, pair)
        problems = _wait_while_it_lasts(cluster, fault, struck_at)
        healed_at = clock.now()
        _heal(cluster, fault, pair)
        time.sleep(_AFTERWARDS_S)
    finally:
        outcomes = load.stop()
    cluster.wait_whole(WHOLE_WITHIN_S)
    cluster.assert_idle(IDLE_WITHIN_S)
    _end_exiles(cluster)
    problems += load.problems() + cluster.new_errors()
    return Report(outcomes, problems, _served_between(outcomes, struck_at, healed_at))


def _questions(fault: Fault, seed: int) -> list[Callable[[], object]]:
    pressed = fault.state in PRESSED
    kind = growing_question if pressed else digest_question
    clients = PRESSING_CLIENTS if pressed else CLIENTS
    return [
        functools.partial(kind, random.Random(1000 * seed + number)) for number in range(clients)
    ]


def _wait_while_it_lasts(cluster: FaultCluster, fault: Fault, struck_at: float) -> list[str]:
    """Until the fault is to end. One who comes when everybody knows of it must be served."""
    clock = MonotonicClock()
    lasts_s = 0.0 if fault.blow is Blow.KILL else fault.for_s or GIVE_UP_S
    problems = []
    # Where there is no room, a newcomer queues like everybody.
    if lasts_s >= LONG_S and fault.state not in PRESSED:
        time.sleep(NOTICED_S)
        outcome = ask(cluster.address, digest_question(random.Random(0)), NEWCOMER_S)
        if outcome.code != "OK":
            problems.append(f"a newcomer was not served while the fault lasted: {outcome}")
    time.sleep(max(0.0, struck_at + lasts_s - clock.now()))
    return problems


def _served_between(outcomes: list[Outcome], start: float, end: float) -> int:
    return sum(
        outcome.code == "OK"
        and outcome.ended_at - outcome.took_s > start
        and outcome.ended_at < end
        for outcome in outcomes
    )


# --- the moment -------------------------------------------------------------------------------


def _wait_for_moment(cluster: FaultCluster, fault: Fault, tail: TraceTail) -> _Pair:
    decoding = fault.state == "decoding"
    state = "adopted" if decoding else fault.state
    if fault.aim is Aim.TRACE:
        pair = _traced(cluster, fault.side, state, tail)
    else:
        pair = _held(cluster, fault.side, state)
    if decoding:
        if pair.held is not None:
            pair.held.release()
        time.sleep(_DECODING_S)
    return pair


def _traced(cluster: FaultCluster, side: str, state: str, tail: TraceTail) -> _Pair:
    line = tail.wait_for(side, state, MOMENT_S)
    other = "sink" if side == "source" else "source"
    peer = tail.worker_of(line.handoff, other, _PEER_S)
    workers = {side: cluster.workers[line.worker_id], other: cluster.workers[peer]}
    return _Pair(workers["source"], workers["sink"], None)


def _held(cluster: FaultCluster, side: str, state: str) -> _Pair:
    clock = MonotonicClock()
    workers = cluster.of_role(Role.PREFILL if side == "source" else Role.DECODE)
    for worker in workers:
        worker.hold_at(side, state)
    deadline = clock.now() + MOMENT_S
    found: list[tuple[WorkerHandle, Held]] = []
    while not found:
        assert clock.now() < deadline, f"no handoff was {side} {state} within {MOMENT_S} s"
        time.sleep(_POLL_S)
        asked = [(worker, worker.take_held(side, state)) for worker in workers]
        found = [(worker, held) for worker, held in asked if held is not None]
    standing, held = found[0]
    for worker in workers:
        if worker is not standing:
            worker.pass_by(side, state)
    return _Pair(
        cluster.by_incarnation(held.key.source_incarnation),
        cluster.by_incarnation(held.key.sink_incarnation),
        standing,
    )


class _SlowPrefill:
    """Prefill workers that now and then stand still before they begin: meanwhile the answers at
    the decode workers grow into the room that was kept for the next prompt."""

    def __init__(self, cluster: FaultCluster) -> None:
        self._cluster = cluster
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc: object) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        workers = self._cluster.of_role(Role.PREFILL)
        while not self._ending.is_set():
            for worker in workers:
                worker.hold_at("source", "queued")
            self._ending.wait(_SLOW_S)
            for worker in workers:
                worker.pass_by("source", "queued")
            self._ending.wait(_SLOW_S / 10)


# --- the blow ---------------------------------------------------------------------------------


def _strike(cluster: FaultCluster, fault: Fault, pair: _Pair) -> None:
    victim = pair.of(fault.victim)
    match fault.blow:
        case Blow.KILL:
            cluster.kill(victim)
        case Blow.FREEZE:
            victim.signal(signal.SIGSTOP)
        case _:
            assert cluster.wire is not None, "cuts need a network of their own"
            cluster.wire.set_rule(RULES[fault.blow], *_wires(fault, pair))
    if pair.held is not None:
        pair.held.release()


def _heal(cluster: FaultCluster, fault: Fault, pair: _Pair) -> None:
    victim = pair.of(fault.victim)
    match fault.blow:
        case Blow.KILL:
            return
        case Blow.FREEZE:
            victim.signal(signal.SIGCONT)
        case Blow.ISOLATE if fault.for_s is None:
            cluster.exile(victim)
        case _:
            assert cluster.wire is not None, "cuts need a network of their own"
            cluster.wire.set_rule(None, *_wires(fault, pair))


def _end_exiles(cluster: FaultCluster) -> None:
    """They have shown that they are idle."""
    for worker in list(cluster.exiles):
        cluster.end_exile(worker)
        assert cluster.wire is not None, "only a cut makes an exile"
        cluster.wire.set_rule(None, worker.plan.address)


def _wires(fault: Fault, pair: _Pair) -> tuple[str, ...]:
    if fault.blow is Blow.ISOLATE:
        return (pair.of(fault.victim).plan.address,)
    return (pair.source.plan.address, pair.sink.plan.address)
