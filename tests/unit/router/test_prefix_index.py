from __future__ import annotations

import contextlib
import random
from dataclasses import replace

import numpy as np
import pytest

from kvferry.ids import Incarnation, WorkerId
from kvferry.kv_events import (
    AllBlocksCleared,
    BlockHash,
    BlocksRemoved,
    BlocksStored,
    KvEvent,
    KvEventBatch,
)
from kvferry.limits import INDEXED_BLOCKS_APPLIED_AT_ONCE
from router.prefix_index import EventGap, IndexedWorker, PrefixIndex

W1, W2 = WorkerId("w1"), WorkerId("w2")


def hashes(*numbers: int) -> tuple[BlockHash, ...]:
    return tuple(map(BlockHash, numbers))


def batch(
    sequence: int,
    *events: KvEvent,
    worker: WorkerId = W1,
    incarnation: int = 1,
    snapshot: bool = False,
) -> KvEventBatch:
    return KvEventBatch(worker, Incarnation(incarnation), sequence, snapshot, events)


def index_of(*workers: WorkerId, **bounds: int) -> PrefixIndex:
    """An index that knows nothing yet of these."""
    index = PrefixIndex(**bounds)
    for worker in workers:
        index.join(worker, Incarnation(1))
    return index


def index_with(*blocks: int) -> PrefixIndex:
    index = index_of(W1, W2)
    index.apply(batch(10, BlocksStored(hashes(*blocks)), snapshot=True))
    return index


PROMPT = hashes(1, 2, 3, 4, 5)


def test_what_is_expected_is_passed_on_and_is_no_hit() -> None:
    told: list[tuple[WorkerId, list[int]]] = []
    index = PrefixIndex(on_expected=lambda name, blocks: told.append((name, blocks.tolist())))
    index.join(W1, Incarnation(1))
    expected = (np.array(PROMPT, dtype="<u8").tobytes(),)
    with pytest.raises(EventGap):
        index.apply(replace(batch(10), expected=expected))
    index.apply(batch(10, BlocksStored(hashes(1, 2)), snapshot=True))
    index.apply(replace(batch(10), expected=expected))
    index.apply(replace(batch(11, BlocksStored(hashes(3))), expected=2 * expected))
    assert told == 3 * [(W1, list(PROMPT))]
    assert index.report().counts.expected == 3
    assert index.blocks(W1) == {1, 2, 3}
    assert index.hit_blocks(W1, PROMPT) == 3
    index.join(W1, Incarnation(2))
    index.apply(replace(batch(10), expected=expected))
    assert len(told) == 3, "of a process that is gone"


@pytest.mark.parametrize("held", range(6))
def test_a_hit_is_the_number_of_leading_blocks_held(held: int) -> None:
    index = index_with(*range(1, held + 1), 77, 78)
    assert index.hit_blocks(W1, PROMPT) == held


def test_an_unknown_worker_holds_nothing() -> None:
    assert index_with(1, 2).hit_blocks(W2, PROMPT) == 0
    assert index_with(1, 2).hit_blocks(WorkerId("w3"), PROMPT) == 0


def test_events_in_sequence_change_what_is_held() -> None:
    index = index_with(1)
    index.apply(batch(11, BlocksStored(hashes(2, 3))))
    assert index.hit_blocks(W1, PROMPT) == 3
    index.apply(batch(12, BlocksRemoved(hashes(3)), BlocksStored(hashes(9))))
    assert index.hit_blocks(W1, PROMPT) == 2
    index.apply(batch(13, AllBlocksCleared()))
    assert index.blocks(W1) == frozenset()


def test_a_gap_forgets_the_worker_until_its_snapshot() -> None:
    index = index_with(1)
    with pytest.raises(EventGap, match="w1: batch 12 after 10"):
        index.apply(batch(12, BlocksStored(hashes(2))))
    assert index.worker(W1) == IndexedWorker(0, known_to=None, is_full=False)
    with pytest.raises(EventGap, match="before any snapshot"):
        index.apply(batch(13, BlocksStored(hashes(2))))
    index.apply(batch(13, BlocksStored(hashes(1, 2)), snapshot=True))
    assert index.hit_blocks(W1, PROMPT) == 2
    assert index.worker(W1) == IndexedWorker(2, known_to=13, is_full=False)


def test_a_mark_shows_that_the_last_changes_were_lost() -> None:
    index = index_with(1)
    index.apply(batch(10))
    index.apply(batch(9))
    assert index.hit_blocks(W1, PROMPT) == 1
    with pytest.raises(EventGap):
        index.apply(batch(11))
    assert index.hit_blocks(W1, PROMPT) == 0
    with pytest.raises(EventGap):
        index.apply(batch(11))


def test_doubled_changes_are_ignored() -> None:
    index = index_with(1)
    index.apply(batch(11, BlocksStored(hashes(2))))
    index.apply(batch(12, BlocksRemoved(hashes(2))))
    index.apply(batch(11, BlocksStored(hashes(2))))
    assert index.hit_blocks(W1, PROMPT) == 1
    assert (index.report().counts.changes, index.report().counts.repeated) == (2, 1)


def test_a_snapshot_older_than_what_is_known_is_ignored() -> None:
    index = index_with(1)
    index.apply(batch(11, BlocksStored(hashes(2))))
    index.apply(batch(10, BlocksStored(hashes(1)), snapshot=True))
    assert index.hit_blocks(W1, PROMPT) == 2


def test_a_snapshot_from_before_a_gap_is_ignored() -> None:
    index = index_with(1)
    with pytest.raises(EventGap):
        index.apply(batch(14, BlocksStored(hashes(2))))
    index.apply(batch(13, BlocksStored(hashes(1)), snapshot=True))
    assert not index.worker(W1).is_known
    index.apply(batch(14, BlocksStored(hashes(1, 2)), snapshot=True))
    assert index.hit_blocks(W1, PROMPT) == 2


@pytest.mark.parametrize("is_snapshot", [False, True])
@pytest.mark.parametrize("incarnation", [0, 2])
def test_another_incarnation_is_not_believed(incarnation: int, is_snapshot: bool) -> None:
    index = index_with(1)
    stranger = batch(11, BlocksStored(hashes(2)), incarnation=incarnation, snapshot=is_snapshot)
    index.apply(stranger)
    index.apply(batch(11, BlocksStored(hashes(2)), worker=WorkerId("nobody")))
    assert index.blocks(W1) == frozenset(hashes(1))
    assert index.report().counts.stale == 2


def test_a_new_incarnation_begins_with_nothing() -> None:
    index = index_with(1, 2)
    index.join(W1, Incarnation(2))
    assert index.hit_blocks(W1, PROMPT) == 0
    index.apply(batch(11, BlocksStored(hashes(3))))
    assert index.blocks(W1) == frozenset()
    index.apply(batch(0, BlocksStored(hashes(1)), incarnation=2, snapshot=True))
    index.apply(batch(12, BlocksStored(hashes(2)), snapshot=True))
    assert index.blocks(W1) == frozenset(hashes(1))


def test_a_snapshot_replaces_everything() -> None:
    index = index_with(1, 2, 3)
    index.apply(batch(12, BlocksStored(hashes(1)), snapshot=True))
    assert index.blocks(W1) == frozenset(hashes(1))


def test_a_worker_that_left_has_no_entries() -> None:
    index = index_with(1, 2)
    index.leave(W1)
    index.leave(W1)
    index.apply(batch(11, BlocksStored(hashes(1, 2)), snapshot=True))
    assert (index.hit_blocks(W1, PROMPT), index.report().blocks) == (0, 0)
    # Who gets its number finds nothing of it.
    index.join(WorkerId("w3"), Incarnation(1))
    assert not index.hits(PROMPT, index.numbers_of([W1, W2, WorkerId("w3")])).any()


def test_hits_of_all_workers_come_at_once() -> None:
    names = [WorkerId(f"w{number}") for number in range(70)]
    index = index_of(*names)
    lengths = [(7 * number) % 6 for number in range(70)]
    for name, length in zip(names, lengths, strict=True):
        index.apply(batch(0, BlocksStored(PROMPT[:length]), worker=name, snapshot=True))
    numbers = index.numbers_of([*names, WorkerId("nobody")])
    assert index.hits(PROMPT, numbers).tolist() == [*lengths, 0]
    assert index.report().blocks == 5
    index.leave(names[65])
    assert index.hits(np.array(PROMPT, dtype=np.uint64), numbers)[65] == 0
    assert index.numbers_of([names[65]]) == numbers[-1]


def test_hits_of_several_indexes_are_noted_in_one_column() -> None:
    """Also when an index has got more workers since: whoever is not in it stays without a hit."""
    one, other = index_of(W1), index_of(W2)
    for index, name, length in ((one, W1, 3), (other, W2, 5)):
        index.apply(batch(0, BlocksStored(PROMPT[:length]), worker=name, snapshot=True))
    numbers = [index.numbers_of([W1, W2]) for index in (one, other)]
    for number in range(70):
        name = WorkerId(f"late{number}")
        one.join(name, Incarnation(1))
        one.apply(batch(0, BlocksStored(PROMPT), worker=name, snapshot=True))
    found = np.zeros(2, dtype=np.int64)
    for index, those in zip((one, other), numbers, strict=True):
        index.note_hits(np.array(PROMPT, dtype=np.uint64), those, 16, found)
    assert found.tolist() == [48, 80]


def test_a_worker_takes_no_more_than_its_share_and_what_is_known_stays_true() -> None:
    index = index_of(W1, blocks_per_worker_max=4)
    index.apply(batch(0, BlocksStored(hashes(1, 2)), snapshot=True))
    index.apply(batch(1, BlocksStored(hashes(3, 4, 5, 6))))
    assert index.blocks(W1) == frozenset(hashes(1, 2, 3, 4))
    assert index.worker(W1).is_full
    # Room after a removal is not used: block 6 without block 5 would be no prefix.
    index.apply(batch(2, BlocksRemoved(hashes(4)), BlocksStored(hashes(6))))
    assert index.blocks(W1) == frozenset(hashes(1, 2, 3))
    # Once there is enough room, the worker is asked for all it holds.
    with pytest.raises(EventGap, match="room"):
        index.apply(batch(3, BlocksRemoved(hashes(3))))
    index.apply(batch(3, BlocksStored(hashes(1, 2)), snapshot=True))
    assert index.worker(W1) == IndexedWorker(2, known_to=3, is_full=False)


def test_memory_is_bounded_whatever_arrives() -> None:
    rng = random.Random(3)
    index = index_of(W1, W2, blocks_max=2048)
    bound = index.report().nbytes_max
    for sequence in range(40):
        blocks = BlocksStored(hashes(*(rng.getrandbits(64) for _ in range(500))))
        for worker in (W1, W2):
            with contextlib.suppress(EventGap):
                index.apply(batch(sequence, blocks, worker=worker, snapshot=sequence % 9 == 0))
    report = index.report()
    assert report.blocks <= 2048
    assert report.nbytes <= report.nbytes_max == bound == 2 * 2048 * 16
    assert report.counts.left_out > 0


def test_room_that_others_leave_is_used() -> None:
    index = index_of(W1, W2, blocks_max=2**14)
    rng = random.Random(4)
    one, other = (hashes(*(rng.getrandbits(64) for _ in range(9000))) for _ in range(2))
    index.apply(batch(0, BlocksStored(one), snapshot=True))
    index.apply(batch(0, BlocksStored(other), worker=W2, snapshot=True))
    assert index.worker(W2).is_full
    index.leave(W1)
    with pytest.raises(EventGap, match="room"):
        index.apply(batch(0, worker=W2))
    index.apply(batch(0, BlocksStored(other), worker=W2, snapshot=True))
    assert index.blocks(W2) == frozenset(other)


def test_a_long_snapshot_is_taken_in_steps_and_dropped_with_its_worker() -> None:
    index = index_of(W1)
    long = BlocksStored(hashes(*range(1, 3 * INDEXED_BLOCKS_APPLIED_AT_ONCE)))
    steps = index.steps(batch(0, long, snapshot=True))
    next(steps)
    assert index.worker(W1).blocks == INDEXED_BLOCKS_APPLIED_AT_ONCE
    index.join(W1, Incarnation(2))
    assert list(steps) == []
    assert (index.worker(W1).blocks, index.report().blocks) == (0, 0)


def test_the_state_of_the_index_is_told() -> None:
    index = index_with(1, 2, 3)
    report = index.report()
    assert (report.workers, report.known_workers, report.blocks) == (2, 1, 3)
    with pytest.raises(EventGap):
        index.apply(batch(20))
    assert (index.report().known_workers, index.report().counts.gaps) == (0, 1)
    assert report.counts.gaps == 0
