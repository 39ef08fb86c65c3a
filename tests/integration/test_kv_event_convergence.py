"""What a router knows of a worker's cache, through everything that can happen to its events."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pytest

from engine import kv_event_feed
from engine.kv_event_feed import KvEventFeed, Subscribe, Unsubscribe, blocks_in
from kvferry.clock import ManualClock
from kvferry.convert import kv_batch_from_wire, kv_batch_to_wire
from kvferry.ids import Incarnation, WorkerId
from mem_cache.block_log import BlockLog
from router.prefix_index import EventGap, PrefixIndex
from tests.support.engine_bench import EngineBench

if TYPE_CHECKING:
    from kvferry.kv_events import KvEventBatch

WORKER = WorkerId("w")
BACKLOG_MAX = 12


@dataclass(eq=False)
class Line:
    """A subscriber whose batches wait, over the wire's format, until somebody reads them."""

    waiting: deque[KvEventBatch] = field(default_factory=deque)

    def deliver(self, batch: KvEventBatch) -> None:
        self.waiting.append(kv_batch_from_wire(kv_batch_to_wire(batch)))

    def backlog_blocks(self) -> int:
        return sum(blocks_in(batch) for batch in self.waiting)

    def is_caught_up(self) -> bool:
        return not self.waiting

    def end(self) -> None:
        raise AssertionError("nothing stops here")


class Cluster:
    """One worker's cache and the index of a router that follows it."""

    def __init__(self, log_blocks_max: int | None = None) -> None:
        self.rng = random.Random(5)
        self.index = PrefixIndex()
        self.batches_read = 0
        self.start_worker(Incarnation(1), log_blocks_max)

    def start_worker(self, incarnation: Incarnation, log_blocks_max: int | None = None) -> None:
        """A fresh process: empty cache, new incarnation."""
        self.bench = EngineBench(num_slots=256)
        self.bench.kv_cache.auditing = False  # what is told is looked at, not what is held
        if log_blocks_max is not None:
            self.bench.kv_cache.tree._log = BlockLog(log_blocks_max)
        self.feed = KvEventFeed(self.bench.kv_cache, WORKER, incarnation, ManualClock())
        self.index.join(WORKER, incarnation)
        self.subscribe()

    def subscribe(self) -> None:
        self.line = Line()
        self.feed.handle(Subscribe(self.line))

    def resubscribe(self) -> None:
        """What the router's monitor does about a gap."""
        self.feed.handle(Unsubscribe(self.line))
        self.subscribe()

    def answer(self) -> None:
        """One request: stores blocks, and evicts others once the cache is full."""
        head = [20 + self.rng.randrange(3)] * 32
        tail = [self.rng.randrange(10, 200) for _ in range(self.rng.randrange(1, 40))]
        self.bench.submit(f"r{self.rng.random()}", head + tail, max_tokens=2)
        self.bench.run()
        self.feed.flush()

    def read(self, batches_max: int = 10**6) -> None:
        while self.line.waiting and batches_max > 0:
            batches_max -= 1
            self.batches_read += 1
            self.index.apply(self.line.waiting.popleft())

    def assert_converged(self) -> None:
        held = set(self.bench.kv_cache.snapshot_blocks())
        assert held
        assert self.index.blocks(WORKER) == held


def test_a_reader_that_keeps_up_knows_the_cache_exactly() -> None:
    cluster = Cluster()
    for _ in range(40):
        cluster.answer()
        cluster.read()
        cluster.assert_converged()


@pytest.mark.parametrize("lost_at", [1, 7, 20])
def test_a_lost_batch_is_noticed_and_a_new_subscription_mends_it(lost_at: int) -> None:
    cluster = Cluster()
    gaps = 0
    for number in range(30):
        cluster.answer()
        if number == lost_at and cluster.line.waiting:
            cluster.line.waiting.popleft()
        try:
            cluster.read()
        except EventGap:
            gaps += 1
            assert cluster.index.blocks(WORKER) == frozenset()
            cluster.resubscribe()
            cluster.read()
        if gaps:
            cluster.assert_converged()
    assert gaps == 1
    cluster.assert_converged()


def test_late_batches_of_a_process_that_is_gone_are_not_believed() -> None:
    cluster = Cluster()
    for _ in range(3):
        cluster.answer()
    old = cluster.line
    cluster.start_worker(Incarnation(2))
    cluster.answer()
    cluster.read()
    cluster.assert_converged()
    assert {batch.snapshot for batch in old.waiting} == {True, False}
    for late in old.waiting:
        cluster.index.apply(late)
    cluster.assert_converged()


@pytest.mark.parametrize("seed", range(3))
def test_a_slow_reader_costs_a_bounded_amount_and_converges(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_event_feed, "KV_EVENTS_BUFFERED_MAX", BACKLOG_MAX)
    cluster = Cluster()
    cluster.rng.seed(seed)
    snapshots = 0
    for _ in range(50):
        cluster.answer()
        waiting = cluster.line.waiting
        largest = max((blocks_in(batch) for batch in waiting), default=0)
        assert cluster.line.backlog_blocks() <= BACKLOG_MAX + largest
        assert sum(batch.snapshot for batch in waiting) <= 1
        snapshots += any(batch.snapshot for batch in waiting)
        cluster.read(cluster.rng.randrange(2))
    assert snapshots > 1, "the reader was never behind"
    cluster.read()
    cluster.feed.flush()
    cluster.read()
    cluster.assert_converged()


def test_a_reader_that_never_reads_is_given_no_more_than_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_event_feed, "KV_EVENTS_BUFFERED_MAX", BACKLOG_MAX)
    cluster = Cluster()
    for _ in range(30):
        cluster.answer()
    before = len(cluster.line.waiting)
    for _ in range(20):
        cluster.answer()
    assert len(cluster.line.waiting) == before


def test_more_changes_than_the_log_holds_become_the_whole_truth() -> None:
    cluster = Cluster(log_blocks_max=3)
    cluster.read()
    for _ in range(20):
        cluster.answer()
        cluster.read()
        cluster.assert_converged()


def test_nobody_who_asks_costs_nothing_that_grows() -> None:
    bench = EngineBench(num_slots=256)
    feed = KvEventFeed(bench.kv_cache, WORKER, Incarnation(1), ManualClock())
    for number in range(10):
        prompt = np.random.default_rng(number).integers(10, 200, 60).tolist()
        bench.submit(f"r{number}", prompt)
        bench.run()
        feed.flush()
        assert bench.kv_cache.take_events() == []
