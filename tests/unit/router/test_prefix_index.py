from __future__ import annotations

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
from router.prefix_index import EventGap, PrefixIndex

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


def index_with(*blocks: int) -> PrefixIndex:
    index = PrefixIndex()
    index.apply(batch(10, BlocksStored(hashes(*blocks)), snapshot=True))
    return index


PROMPT = hashes(1, 2, 3, 4, 5)


@pytest.mark.parametrize("held", range(6))
def test_a_hit_is_the_number_of_leading_blocks_held(held: int) -> None:
    index = index_with(*range(1, held + 1), 77, 78)
    assert index.hit_blocks(W1, PROMPT) == held


def test_an_unknown_worker_holds_nothing() -> None:
    assert index_with(1, 2).hit_blocks(W2, PROMPT) == 0


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
    with pytest.raises(EventGap):
        index.apply(batch(12, BlocksStored(hashes(2))))
    assert index.hit_blocks(W1, PROMPT) == 0
    with pytest.raises(EventGap):
        index.apply(batch(13, BlocksStored(hashes(2))))
    index.apply(batch(13, BlocksStored(hashes(1, 2)), snapshot=True))
    assert index.hit_blocks(W1, PROMPT) == 2


def test_a_doubled_batch_is_ignored() -> None:
    index = index_with(1)
    index.apply(batch(11, BlocksStored(hashes(2))))
    index.apply(batch(12, BlocksRemoved(hashes(2))))
    index.apply(batch(11, BlocksStored(hashes(2))))
    assert index.hit_blocks(W1, PROMPT) == 1


def test_events_of_another_incarnation_never_mix() -> None:
    index = index_with(1)
    with pytest.raises(EventGap):
        index.apply(batch(11, BlocksStored(hashes(2)), incarnation=2))
    assert index.blocks(W1) == frozenset()


def test_a_snapshot_replaces_everything() -> None:
    index = index_with(1, 2, 3)
    index.apply(batch(0, BlocksStored(hashes(1)), incarnation=2, snapshot=True))
    assert index.blocks(W1) == frozenset(hashes(1))


def test_a_dropped_worker_has_no_entries() -> None:
    index = index_with(1, 2)
    index.drop(W1)
    index.drop(W1)
    assert (index.hit_blocks(W1, PROMPT), index.block_count(W1)) == (0, 0)


def test_memory_is_bounded_and_what_is_known_stays_true() -> None:
    index = PrefixIndex(blocks_per_worker_max=3)
    index.apply(batch(0, BlocksStored(hashes(1, 2)), snapshot=True))
    index.apply(batch(1, BlocksStored(hashes(3, 4, 5))))
    assert index.blocks(W1) == frozenset(hashes(1, 2, 3))
    # Room after a removal is not used: block 5 without block 4 would be no prefix.
    index.apply(batch(2, BlocksRemoved(hashes(3)), BlocksStored(hashes(5))))
    assert index.blocks(W1) == frozenset(hashes(1, 2))
    index.apply(batch(3, BlocksStored(hashes(1, 2, 3)), snapshot=True))
    assert index.hit_blocks(W1, PROMPT) == 3
