"""The engine thread: events in, steps, and an end that everyone is told of."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from engine.step_loop import StepLoop
from kvferry.clock import MonotonicClock
from tests.support.digest_model import answer
from tests.support.engine_bench import EngineBench
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from kvferry.errors import KvferryError

PROMPT = [20, 21, 22, 23, 24]


@dataclass
class NoHandoffs:
    """What the snapshot asks of the handoff driver."""

    link_bytes_per_s: float = 0.0
    counters: dict[str, int] = field(default_factory=lambda: {"chunks_received": 3})

    def handoffs_open(self) -> int:
        return 0


@dataclass(eq=False)
class Part:
    """A loop part that runs callables as events, and counts its turns."""

    turns: int = 0
    stopped: list[KvferryError] = field(default_factory=list)

    def handle(self, event: object) -> bool:
        if not callable(event):
            return False
        event()
        return True

    def tick(self) -> None:
        pass

    def next_deadline(self) -> float | None:
        return None

    def flush(self) -> None:
        self.turns += 1

    def stop(self, error: KvferryError) -> None:
        self.stopped.append(error)


class Bench:
    def __init__(self) -> None:
        self.engine_bench = EngineBench()
        self.part = Part()
        self.loop = StepLoop(self.engine_bench.engine, NoHandoffs(), MonotonicClock())
        self.loop.start([self.part])


def test_event_becomes_an_answer_and_the_snapshot_tells() -> None:
    bench = Bench()
    bench.loop.post(lambda: bench.engine_bench.submit("r", PROMPT))
    ends = bench.engine_bench.recorder.ends
    wait_until("answered", lambda: "r" in ends)
    wait_until("idle snapshot", lambda: bench.loop.snapshot.accounts.evictable > 0)
    bench.loop.stop()
    assert bench.engine_bench.recorder.told["r"] == answer(PROMPT, 8)
    assert bench.loop.snapshot.accounts.is_idle
    assert bench.loop.snapshot.counters["chunks_received"] == 3
    assert bench.loop.snapshot.counters["engine_steps"] == 8


def test_idle_loop_sleeps_even_with_requests_that_cannot_start() -> None:
    bench = Bench()
    engine_bench = bench.engine_bench
    held = engine_bench.request("held", list(range(10, 210)), prefill_only=True)
    bench.loop.post(lambda: engine_bench.engine.submit(held))
    bench.loop.post(lambda: engine_bench.submit("waits", list(range(20, 180))))
    wait_until("queued", lambda: bench.loop.snapshot.load.waiting == 1)
    before = bench.part.turns
    threading.Event().wait(0.1)
    assert bench.part.turns - before <= 2
    bench.loop.post(lambda: engine_bench.engine.end(held))
    wait_until("answered", lambda: "waits" in engine_bench.recorder.ends)
    bench.loop.stop()


def test_copy_that_is_done_wakes_an_idle_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.step_loop.ENGINE_IDLE_WAIT_S", 60.0)
    bench = Bench()
    bench.loop.post(lambda: None)
    wait_until("asleep", lambda: bench.part.turns == 1)
    bench.engine_bench.kv_cache.on_copy_done()
    wait_until("woken", lambda: bench.part.turns == 2)
    bench.loop.stop()


@pytest.mark.filterwarnings("error")
def test_unexpected_exception_ends_the_loop_and_is_told() -> None:
    bench = Bench()

    def fail() -> None:
        raise ZeroDivisionError("a bug")

    bench.loop.post(fail)
    wait_until("stopped", lambda: bench.part.stopped != [])
    assert "a bug" in str(bench.part.stopped[0])
    assert not bench.loop.is_alive()


def test_stop_tells_the_parts_once() -> None:
    bench = Bench()
    bench.loop.stop()
    assert len(bench.part.stopped) == 1
    assert not bench.loop.is_alive()


def test_news_leave_before_the_step_they_make_possible() -> None:
    bench = Bench()
    order: list[str] = []
    original = bench.engine_bench.engine.step

    def step() -> bool:
        order.append("step")
        return original()

    bench.engine_bench.engine.step = step
    bench.part.flush = lambda: order.append("flush")
    bench.loop.post(lambda: order.append("event"))
    wait_until("turned", lambda: "event" in order and order[-1] == "step")
    bench.loop.stop()
    first = order.index("event")
    assert order[first : first + 3] == ["event", "flush", "step"]


def test_between_two_steps_parts_are_flushed_once_unless_an_event_came() -> None:
    bench = Bench()
    order: list[str] = []
    original = bench.engine_bench.engine.step

    def step() -> bool:
        computed = original()
        order.append("step" if computed else "idle")
        return computed

    bench.engine_bench.engine.step = step
    bench.part.flush = lambda: order.append("flush")
    bench.loop.post(lambda: bench.engine_bench.submit("r", PROMPT, max_tokens=5))
    wait_until("answered", lambda: "r" in bench.engine_bench.recorder.ends)
    wait_until("idle", lambda: "idle" in order[order.index("step") :])
    bench.loop.stop()
    first = order.index("step")
    assert order[first - 1 : first + 11] == ["flush", *(["step", "flush"] * 5), "idle"]


def test_idle_loop_audits_its_ledger_and_a_violation_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.step_loop.IDLE_AUDIT_INTERVAL_S", 0.0)
    bench = Bench()
    cache = bench.engine_bench.kv_cache
    bench.loop.post(lambda: bench.engine_bench.submit("r", PROMPT))
    wait_until("answered", lambda: "r" in bench.engine_bench.recorder.ends)
    # A slot that nobody owns any more: what a leak looks like.
    bench.loop.post(lambda: cache.allocator.alloc(4))
    bench.loop.post(lambda: bench.engine_bench.submit("next", PROMPT[:2]))
    wait_until("stopped", lambda: bench.part.stopped != [])
    assert "LedgerError" in str(bench.part.stopped[0])
