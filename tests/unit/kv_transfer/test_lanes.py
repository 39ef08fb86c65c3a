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


def test_degrees_that_do_not_divide_one_another():
    """Six heads: source ranks hold 0-2 and 3-5, sink ranks 0-1, 2-3 and 4-5."""
    assert lanes_between(2, 3, 6) == (
        Lane(0, 0, 0, Heads(0, 2), Heads(0, 2)),
        Lane(1, 0, 1, Heads(2, 3), Heads(0, 1)),
        Lane(2, 1, 1, Heads(0, 1), Heads(1, 2)),
        Lane(3, 1, 2, Heads(1, 3), Heads(0, 2)),
    )


@pytest.mark.parametrize(("source_ranks", "sink_ranks"), [(2, 3), (3, 2), (4, 6), (6, 4), (12, 4)])
def test_the_way_back_has_the_same_lanes(source_ranks, sink_ranks):
    there = lanes_between(source_ranks, sink_ranks, 12)
    back = lanes_between(sink_ranks, source_ranks, 12)
    turned = {
        (lane.sink_rank, lane.source_rank, lane.sink_heads, lane.source_heads) for lane in there
    }
    assert turned == {
        (lane.source_rank, lane.sink_rank, lane.source_heads, lane.sink_heads) for lane in back
    }
    assert sum(lane.source_heads.stop - lane.source_heads.start for lane in there) == 12
