"""Full collections happen when the worker says so."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import pytest

from engine.garbage import GarbageCollections
from kvferry.clock import ManualClock
from kvferry.errors import WorkerUnavailable
from kvferry.limits import FULL_COLLECTION_IDLE_S, FULL_COLLECTION_INTERVAL_S

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Cycle:
    def __init__(self) -> None:
        self.itself = self


class _Bench:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.idle = False
        self.part = GarbageCollections(self.clock, lambda: self.idle)

    def after(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.part.tick()


@pytest.fixture
def bench() -> Iterator[_Bench]:
    made = _Bench()
    yield made
    made.part.stop(WorkerUnavailable("the test is over"))


def _old_garbage() -> weakref.ref[_Cycle]:
    """A cycle that nobody refers to and that only a full collection sees."""
    cycle = _Cycle()
    gc.collect()
    return weakref.ref(cycle)


def test_a_busy_worker_collects_seldom(bench: _Bench) -> None:
    garbage = _old_garbage()
    bench.after(FULL_COLLECTION_INTERVAL_S - 1.0)
    assert garbage() is not None
    bench.after(1.0)
    assert garbage() is None


def test_an_idle_worker_collects_but_not_all_the_time(bench: _Bench) -> None:
    bench.idle = True
    garbage = _old_garbage()
    bench.after(FULL_COLLECTION_IDLE_S - 1.0)
    assert garbage() is not None
    bench.after(1.0)
    assert garbage() is None
    garbage = _old_garbage()
    bench.after(1.0)
    assert garbage() is not None


def test_python_starts_no_full_collection_by_itself(bench: _Bench) -> None:
    garbage = _old_garbage()
    full = gc.get_stats()[2]["collections"]
    kept = [[number] for number in range(200_000)]
    assert len(kept) == 200_000
    assert gc.get_stats()[2]["collections"] == full
    assert garbage() is not None


def test_what_was_there_at_the_start_is_left_alone_until_the_end() -> None:
    thresholds = gc.get_threshold()
    bench = _Bench()
    assert gc.get_freeze_count() > 0
    bench.part.stop(WorkerUnavailable("the test is over"))
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == thresholds
