"""Readers of KV events know exactly what the radix cache holds, or get a snapshot."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from engine.kv_event_feed import KvEventFeed, Subscribe, Unsubscribe, blocks_in
from kvferry.cache_key import CacheUse, Sharing
from kvferry.clock import ManualClock
from kvferry.errors import InternalError
from kvferry.ids import ExtraKey, Incarnation, WorkerId
from kvferry.kv_events import (
    AllBlocksCleared,
    BlockHash,
    BlocksRemoved,
    BlocksStored,
    KvEventBatch,
    prompt_block_hashes,
    unpack_hashes,
)
from kvferry.limits import KV_EVENTS_BUFFERED_MAX, KV_EVENTS_MARK_INTERVAL_S
from tests.support.engine_bench import EngineBench


@dataclass(eq=False)
class Reader:
    """A subscriber that applies what it is told."""

    blocks: set[BlockHash] = field(default_factory=set)
    batches: list[KvEventBatch] = field(default_factory=list)
    backlog: int = 0
    caught_up: bool = True
    ended: bool = False

    def deliver(self, batch: KvEventBatch) -> None:
        self.batches.append(batch)
        if batch.snapshot:
            self.blocks.clear()
        for event in batch.events:
            match event:
                case BlocksStored(hashes):
                    self.blocks |= set(hashes)
                case BlocksRemoved(hashes):
                    self.blocks -= set(hashes)
                case AllBlocksCleared():
                    self.blocks.clear()

    def backlog_blocks(self) -> int:
        return self.backlog

    def is_caught_up(self) -> bool:
        return self.caught_up

    def end(self) -> None:
        self.ended = True


def _feed(bench: EngineBench) -> KvEventFeed:
    return KvEventFeed(bench.kv_cache, WorkerId("w"), Incarnation(5), ManualClock())


def _answer(bench: EngineBench, feed: KvEventFeed, number: int, length: int = 40) -> list[int]:
    prompt = np.random.default_rng(number).integers(10, 200, length).tolist()
    bench.submit(f"r{number}", prompt)
    bench.run()
    feed.flush()
    return prompt


def test_reader_follows_stores_and_evictions() -> None:
    bench = EngineBench(num_slots=128)
    feed = _feed(bench)
    reader = Reader()
    feed.handle(Subscribe(reader))
    for number in range(10):
        _answer(bench, feed, number)
        assert reader.blocks == set(bench.kv_cache.snapshot_blocks())
    assert any(
        isinstance(event, BlocksRemoved) for batch in reader.batches for event in batch.events
    )
    assert [batch.sequence for batch in reader.batches] == list(range(len(reader.batches)))
    assert {batch.incarnation for batch in reader.batches} == {5}


def test_blocks_are_those_of_the_prompt() -> None:
    bench = EngineBench(num_slots=128)
    feed = _feed(bench)
    reader = Reader()
    feed.handle(Subscribe(reader))
    prompt = _answer(bench, feed, 1)
    hashes = prompt_block_hashes(np.asarray(prompt, dtype=np.int32), 16, ExtraKey(""))
    assert set(hashes) <= reader.blocks


def test_late_reader_begins_with_a_snapshot() -> None:
    bench = EngineBench(num_slots=128)
    feed = _feed(bench)
    _answer(bench, feed, 1)
    reader = Reader()
    feed.handle(Subscribe(reader))
    assert reader.batches[0].snapshot
    assert reader.blocks == set(bench.kv_cache.snapshot_blocks()) != set()


def test_reader_that_falls_behind_converges_by_one_snapshot() -> None:
    bench = EngineBench(num_slots=128)
    feed = _feed(bench)
    reader = Reader()
    feed.handle(Subscribe(reader))
    reader.backlog, reader.caught_up = KV_EVENTS_BUFFERED_MAX + 1, False
    for number in range(5):
        _answer(bench, feed, number)
    assert len(reader.batches) == 1
    reader.backlog = 0
    feed.flush()
    assert len(reader.batches) == 1, "a snapshot for a reader that still has batches to read"
    reader.caught_up = True
    feed.flush()
    assert [(batch.snapshot, batch.sequence) for batch in reader.batches] == [(True, 0), (True, 5)]
    assert reader.blocks == set(bench.kv_cache.snapshot_blocks())


def test_every_reader_sees_the_same_numbers() -> None:
    bench = EngineBench(num_slots=128)
    feed = _feed(bench)
    _answer(bench, feed, 0)
    readers = [Reader(), Reader()]
    for number, reader in enumerate(readers, start=1):
        feed.handle(Subscribe(reader))
        _answer(bench, feed, number)
    first, second = ([(b.snapshot, b.sequence) for b in reader.batches] for reader in readers)
    assert first == [(True, 1), (False, 2), (False, 3)]
    assert second == [(True, 2), (False, 3)]
    assert readers[0].batches[-1] == readers[1].batches[-1]


def test_marks_tell_the_number_of_the_last_changes_to_who_has_read_all() -> None:
    bench, clock = EngineBench(num_slots=128), ManualClock()
    feed = KvEventFeed(bench.kv_cache, WorkerId("w"), Incarnation(5), clock)
    feed.tick()
    assert feed.next_deadline() is None
    reader, busy = Reader(), Reader(caught_up=False)
    feed.handle(Subscribe(reader))
    feed.handle(Subscribe(busy))
    _answer(bench, feed, 1)
    assert feed.next_deadline() == KV_EVENTS_MARK_INTERVAL_S
    feed.tick()
    assert len(reader.batches) == 2
    clock.advance(KV_EVENTS_MARK_INTERVAL_S)
    feed.tick()
    feed.tick()
    mark = KvEventBatch(WorkerId("w"), Incarnation(5), 1, False, ())
    assert reader.batches[2:] == [mark]
    assert len(busy.batches) == 2


def test_a_mark_never_overtakes_changes() -> None:
    bench, clock = EngineBench(num_slots=128), ManualClock()
    feed = KvEventFeed(bench.kv_cache, WorkerId("w"), Incarnation(5), clock)
    reader = Reader()
    feed.handle(Subscribe(reader))
    clock.advance(KV_EVENTS_MARK_INTERVAL_S)
    bench.submit("r", list(range(10, 60)))
    bench.run()
    feed.tick()
    assert [(bool(b.events), b.sequence) for b in reader.batches[1:]] == [(True, 1), (False, 1)]
    assert reader.blocks == set(bench.kv_cache.snapshot_blocks())


class Listeners:
    """A bench whose accepted prompts `count` readers hear of, and what they were told."""

    def __init__(self, count: int = 2, **options: object) -> None:
        self.bench = EngineBench(num_slots=256, **options)
        self.feed = _feed(self.bench)
        self.bench.engine.on_accepted = self.feed.accepted
        self.readers = [Reader() for _ in range(count)]
        for reader in self.readers:
            self.feed.handle(Subscribe(reader))

    def expected(self) -> list[list[BlockHash]]:
        """In the last batch, which says nothing else, or nothing if there is none."""
        told = [reader.batches[-1].expected for reader in self.readers]
        assert told.count(told[0]) == len(told)
        return list(map(unpack_hashes, told[0]))


def _hashes(prompt: list[int]) -> list[BlockHash]:
    return prompt_block_hashes(np.asarray(prompt, dtype=np.int32), 16, ExtraKey(""))


def test_accepted_prompts_are_told_before_they_are_computed() -> None:
    there = Listeners()
    prompt = list(range(10, 60))
    there.bench.submit("a", prompt)
    there.feed.flush()
    assert there.expected() == [_hashes(prompt)]
    batch = there.readers[0].batches[-1]
    assert (batch.sequence, batch.snapshot, batch.events) == (0, False, ())
    assert not there.bench.runner.steps
    there.bench.run()
    there.feed.flush()
    assert there.readers[0].blocks == set(there.bench.kv_cache.snapshot_blocks())
    assert [reader.batches[-1].expected for reader in there.readers] == [(), ()]


def test_only_prompts_that_bring_something_new_are_told_each_once() -> None:
    there = Listeners()
    prompt = list(range(10, 60))
    there.bench.submit("a", prompt)
    there.bench.run()
    there.feed.flush()
    for name, tail in (("held", []), ("longer", [70] * 16), ("again", [70] * 16)):
        there.bench.submit(name, prompt[:48] + tail)
    there.feed.flush()
    assert there.expected() == [_hashes(prompt[:48] + [70] * 16)]


def test_who_listens_alone_is_told_nothing_and_costs_nothing() -> None:
    there = Listeners(count=1)
    there.bench.submit("a", list(range(10, 60)))
    there.feed.flush()
    assert len(there.readers[0].batches) == 1
    late = Reader()
    there.feed.handle(Subscribe(late))
    there.feed.flush()
    assert [batch.snapshot for batch in late.batches] == [True]
    assert late.batches[0].expected == ()


def test_prompts_that_will_publish_nothing_are_not_told() -> None:
    there, nowhere = Listeners(), Listeners(radix=False)
    ended = there.bench.submit("ended", list(range(10, 60)))
    there.bench.engine.end(ended)
    private = there.bench.request("private", list(range(60, 110)))
    private.cache_use = CacheUse(ExtraKey(""), Sharing.PRIVATE)
    there.bench.engine.submit(private)
    nowhere.bench.submit("a", list(range(10, 60)))
    for each in (there, nowhere):
        each.feed.flush()
        assert each.expected() == []


def test_a_prompt_of_a_handoff_that_failed_is_told_when_it_is_computed_here() -> None:
    there = Listeners()
    request = there.bench.request("r", list(range(10, 60)))
    there.bench.engine.submit_inbound(request)
    assert there.bench.engine.next_expected() is request
    there.feed.flush()
    assert there.expected() == []
    there.bench.engine.compute_here(request)
    there.feed.flush()
    assert there.expected() == [_hashes(list(range(10, 60)))]


def test_no_batch_after_unsubscribing_and_one_end_at_stop() -> None:
    bench = EngineBench(num_slots=128)
    feed = _feed(bench)
    gone, there = Reader(), Reader()
    for reader in (gone, there):
        feed.handle(Subscribe(reader))
    feed.handle(Unsubscribe(gone))
    _answer(bench, feed, 1)
    assert len(gone.batches) == 1
    assert sum(blocks_in(batch) for batch in there.batches) > 0
    feed.stop(InternalError("stopping"))
    assert there.ended
    assert not gone.ended


def test_snapshot_is_no_backlog_however_large_it_is() -> None:
    held = BlocksStored(tuple(BlockHash(number) for number in range(KV_EVENTS_BUFFERED_MAX + 1)))
    worker = (WorkerId("w"), Incarnation(5), 0)
    assert blocks_in(KvEventBatch(*worker, True, (held,))) == 0
    assert blocks_in(KvEventBatch(*worker, False, (held,))) == KV_EVENTS_BUFFERED_MAX + 1


def test_what_is_expected_counts_as_backlog() -> None:
    batch = KvEventBatch(WorkerId("w"), Incarnation(5), 0, False, (), (bytes(24), bytes(8)))
    assert blocks_in(batch) == 4
