from __future__ import annotations

import pytest

from kv_transfer.protocol.lanes import Heads, Lane, lanes_between

HEADS = 8


def test_one_rank_each_has_one_lane_with_all_heads():
    assert lanes_between(1, 1, HEADS) == (Lane(0, 0, 0, Heads(0, 8), Heads(0, 8)),)


def test_heads_are_numbered_within_each_rank():
    assert lanes_between(1, 2, HEADS) == (
        Lane(0, 0, 0, Heads(0, 4), Heads(0, 4)),
        Lane(1, 0, 1, Heads(4, 8), Heads(0, 4)),
    )


@pytest.mark.parametrize("source_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("sink_ranks", [1, 2, 4, 8])
def test_every_head_travels_on_exactly_one_lane(source_ranks, sink_ranks):
    lanes = lanes_between(source_ranks, sink_ranks, HEADS)
    assert [lane.index for lane in lanes] == list(range(len(lanes)))
    assert len(lanes) == max(source_ranks, sink_ranks)
    moved = []
    for lane in lanes:
        at_source = lane.source_rank * (HEADS // source_ranks)
        at_sink = lane.sink_rank * (HEADS // sink_ranks)
        sent = range(at_source + lane.source_heads.start, at_source + lane.source_heads.stop)
        taken = range(at_sink + lane.sink_heads.start, at_sink + lane.sink_heads.stop)
        assert sent == taken
        moved += sent
    assert sorted(moved) == list(range(HEADS))


def test_ranks_must_divide_the_heads():
    with pytest.raises(AssertionError, match="8 heads on 3 ranks"):
        lanes_between(3, 1, HEADS)
