from kvferry.kv_events import AllBlocksCleared, BlockHash, BlocksRemoved, BlocksStored
from mem_cache.block_log import BlockLog

A, B, C = BlockHash(1), BlockHash(2), BlockHash(3)


def test_order_is_kept_and_neighbours_of_one_kind_are_one_event():
    log = BlockLog()
    log.stored((A,))
    log.stored((B, C))
    log.removed((A,))
    log.stored((A,))
    assert log.take() == [BlocksStored((A, B, C)), BlocksRemoved((A,)), BlocksStored((A,))]
    assert log.take() == []


def test_no_blocks_no_event():
    log = BlockLog()
    log.stored(())
    log.removed(())
    assert log.take() == []


def test_clearing_swallows_what_was_before_it_only():
    log = BlockLog()
    log.stored((A,))
    log.cleared()
    log.stored((B,))
    assert log.take() == [AllBlocksCleared(), BlocksStored((B,))]


def test_more_than_it_may_hold_is_forgotten_and_said():
    log = BlockLog(blocks_max=2)
    log.stored((A, B))
    log.removed((C,))
    log.stored((A,))
    assert log.take() is None
    log.stored((B, C))
    assert log.take() == [BlocksStored((B, C))]


def test_clearing_makes_up_for_what_was_forgotten():
    log = BlockLog(blocks_max=2)
    log.stored((A, B, C))
    log.cleared()
    log.stored((B,))
    assert log.take() == [AllBlocksCleared(), BlocksStored((B,))]
