from kvferry.kv_events import AllBlocksCleared, BlockHash, BlocksRemoved, BlocksStored
from mem_cache.block_log import BlockLog

A, B, C = BlockHash(1), BlockHash(2), BlockHash(2**64 - 3)


def _digests(*blocks):
    return b"".join(block.to_bytes(8, "little") for block in blocks)


def test_order_is_kept_and_neighbours_of_one_kind_are_one_event():
    log = BlockLog()
    log.stored(_digests(A))
    log.stored(_digests(B, C))
    log.removed(_digests(A))
    log.stored(_digests(A))
    assert log.take() == [BlocksStored((A, B, C)), BlocksRemoved((A,)), BlocksStored((A,))]
    assert log.take() == []


def test_no_blocks_no_event():
    log = BlockLog()
    log.stored(_digests())
    log.removed(_digests())
    assert log.take() == []


def test_clearing_swallows_what_was_before_it_only():
    log = BlockLog()
    log.stored(_digests(A))
    log.cleared()
    log.stored(_digests(B))
    assert log.take() == [AllBlocksCleared(), BlocksStored((B,))]


def test_more_than_it_may_hold_is_forgotten_and_said():
    log = BlockLog(blocks_max=2)
    log.stored(_digests(A, B))
    log.removed(_digests(C))
    log.stored(_digests(A))
    assert log.take() is None
    log.stored(_digests(B, C))
    assert log.take() == [BlocksStored((B, C))]


def test_clearing_makes_up_for_what_was_forgotten():
    log = BlockLog(blocks_max=2)
    log.stored(_digests(A, B, C))
    log.cleared()
    log.stored(_digests(B))
    assert log.take() == [AllBlocksCleared(), BlocksStored((B,))]
