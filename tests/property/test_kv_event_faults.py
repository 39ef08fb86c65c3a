"""Routers that follow real caches over lines that lose, double, delay and reorder what is said.

Whatever happens, a router knows of a worker either nothing or exactly what it held at some moment
of its present life; and once the lines are good again, one snapshot is enough to know it all.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from engine import kv_event_feed
from engine.kv_event_feed import KvEventFeed, Subscribe, Unsubscribe, blocks_in
from kvferry.clock import ManualClock
from kvferry.convert import kv_batch_from_wire, kv_batch_to_wire
from kvferry.ids import Incarnation, WorkerId
from kvferry.limits import KV_EVENTS_MARK_INTERVAL_S
from router.prefix_index import EventGap, PrefixIndex
from tests.support.kv_caches import SHARED, tiny_cache, tokens_of

if TYPE_CHECKING:
    from kvferry.kv_events import KvEventBatch

NAMES = (WorkerId("w0"), WorkerId("w1"))
STEPS = 120
BACKLOG_MAX = 24


@dataclass(eq=False)
class Line:
    """One subscription. What it carries ends up in the router's mail, or does not."""

    worker: Worker
    mail: list[KvEventBatch]
    rng: random.Random
    fault_rate: float

    def deliver(self, batch: KvEventBatch) -> None:
        heard = kv_batch_from_wire(kv_batch_to_wire(batch))
        copies = 1
        if self.rng.random() < self.fault_rate:
            copies = self.rng.choice((0, 0, 2))
        self.mail.extend(copies * [heard])

    def backlog_blocks(self) -> int:
        return sum(blocks_in(batch) for batch in self.unread())

    def is_caught_up(self) -> bool:
        return not self.unread()

    def unread(self) -> list[KvEventBatch]:
        return [batch for batch in self.mail if batch.incarnation == self.worker.incarnation]

    def end(self) -> None:
        raise AssertionError("nothing stops here")


class Witness:
    """A subscriber that misses nothing: what the cache held at each number."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.held: dict[int, frozenset[int]] = {}

    def deliver(self, batch: KvEventBatch) -> None:
        self.held[batch.sequence] = self.worker.blocks()

    def backlog_blocks(self) -> int:
        return 0

    def is_caught_up(self) -> bool:
        return True

    def end(self) -> None:
        raise AssertionError("nothing stops here")


class Worker:
    """One life of a worker: a cache of 24 pages and its feed."""

    def __init__(self, name: WorkerId, incarnation: int) -> None:
        self.name = name
        self.incarnation = Incarnation(incarnation)
        self.clock = ManualClock()
        self.cache = tiny_cache(16, pages=24, auditing=False)
        self.feed = KvEventFeed(self.cache, name, self.incarnation, self.clock)
        self.witness = Witness(self)
        self.feed.handle(Subscribe(self.witness))

    def blocks(self) -> frozenset[int]:
        return frozenset(self.cache.snapshot_blocks())

    def serve(self, rng: random.Random) -> None:
        """Some requests, most of which share a beginning, then their news."""
        for number in range(rng.randrange(1, 4)):
            head = 16 * [rng.randrange(4)]
            tail = [rng.randrange(3) for _ in range(rng.randrange(16, 90))]
            tokens = tokens_of(head + tail)
            kv = self.cache.open(f"r{number}", tokens, SHARED)
            self.cache.extend(kv, len(tokens))
            self.cache.commit(kv, len(tokens))
            self.cache.release(kv, tokens)
        if rng.random() < 0.02:
            self.cache.drop_cache()
        self.feed.flush()

    def mark(self) -> None:
        self.clock.advance(KV_EVENTS_MARK_INTERVAL_S)
        self.feed.tick()


class Follower:
    """A router: an index, and per worker the life it believes in and its subscription."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.fault_rate = 0.15
        self.restart()

    def restart(self) -> None:
        self.index = PrefixIndex()
        self.mail: list[KvEventBatch] = []
        self.believed: dict[WorkerId, Worker] = {}
        self.lines: dict[WorkerId, Line] = {}

    def believe(self, worker: Worker) -> None:
        """What a membership says."""
        self.believed[worker.name] = worker
        self.index.join(worker.name, worker.incarnation)
        self.subscribe(worker)

    def subscribe(self, worker: Worker) -> None:
        """What is left of an older subscription may still arrive."""
        if worker.name in self.lines:
            worker.feed.handle(Unsubscribe(self.lines[worker.name]))
        self.lines[worker.name] = Line(worker, self.mail, self.rng, self.fault_rate)
        worker.feed.handle(Subscribe(self.lines[worker.name]))

    def drain(self, name: WorkerId) -> None:
        self.index.leave(name)
        del self.believed[name]

    def read(self) -> None:
        """Take one batch, now and then not the oldest."""
        if not self.mail:
            return
        late = self.rng.random() < self.fault_rate
        batch = self.mail.pop(self.rng.randrange(min(len(self.mail), 5)) if late else 0)
        try:
            self.index.apply(batch)
        except EventGap:
            worker = self.believed[batch.worker_id]
            assert batch.incarnation == worker.incarnation
            self.subscribe(worker)

    def check(self) -> None:
        """Everything or nothing, and nothing of who is not believed in."""
        for name in NAMES:
            known, blocks = self.index.worker(name), self.index.blocks(name)
            assert known.blocks == len(blocks)
            if known.known_to is None:
                assert not blocks
            else:
                assert blocks == self.believed[name].witness.held[known.known_to]


class Scene:
    """Two workers, two routers."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.lives = 0
        self.workers = {name: self.new_life(name) for name in NAMES}
        self.followers = [Follower(self.rng), Follower(self.rng)]
        for follower in self.followers:
            self.tell_membership(follower)

    def new_life(self, name: WorkerId) -> Worker:
        self.lives += 1
        return Worker(name, self.lives)

    def tell_membership(self, follower: Follower) -> None:
        for name, worker in self.workers.items():
            if follower.believed.get(name) is not worker:
                follower.lines.pop(name, None)
                follower.believe(worker)

    def step(self) -> None:
        name, follower = self.rng.choice(NAMES), self.rng.choice(self.followers)
        draw = self.rng.random()
        if draw < 0.35:
            self.workers[name].serve(self.rng)
        elif draw < 0.40:
            self.workers[name].mark()
        elif draw < 0.42:
            self.workers[name] = self.new_life(name)
        elif draw < 0.48:
            self.tell_membership(follower)
        elif draw < 0.49:
            follower.restart()
            self.tell_membership(follower)
        elif draw < 0.51 and name in follower.believed:
            follower.drain(name)
        else:
            follower.read()
        follower.check()

    def heal(self) -> None:
        """Good lines from now on: what is under way arrives, and then a mark."""
        for follower in self.followers:
            follower.fault_rate = 0.0
            for line in follower.lines.values():
                line.fault_rate = 0.0
            self.tell_membership(follower)
        for _ in range(2):
            for follower in self.followers:
                while follower.mail:
                    follower.read()
                    follower.check()
            for worker in self.workers.values():
                worker.mark()


@pytest.mark.parametrize("seed", range(6))
def test_a_router_knows_the_truth_or_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_event_feed, "KV_EVENTS_BUFFERED_MAX", BACKLOG_MAX)
    scene = Scene(seed)
    for _ in range(STEPS):
        scene.step()
    scene.heal()
    before = [follower.index.report().counts.snapshots for follower in scene.followers]
    for follower in scene.followers:
        while follower.mail:
            follower.read()
    for follower, snapshots in zip(scene.followers, before, strict=True):
        for name, worker in scene.workers.items():
            assert follower.index.blocks(name) == worker.blocks()
            assert follower.index.worker(name).is_known
        counts = follower.index.report().counts
        assert counts.snapshots - snapshots <= len(NAMES)


def test_all_kinds_of_trouble_were_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_event_feed, "KV_EVENTS_BUFFERED_MAX", BACKLOG_MAX)
    counts = []
    for seed in range(3):
        scene = Scene(seed)
        for _ in range(STEPS):
            scene.step()
        counts += [follower.index.report().counts for follower in scene.followers]
    for kind in ("snapshots", "changes", "marks", "repeated", "stale", "gaps"):
        assert sum(getattr(each, kind) for each in counts) > 0, kind
