from __future__ import annotations

import pytest

from kv_transfer.links.staging import StagingRing


def test_a_buffer_is_free_or_taken():
    ring = StagingRing(2, 64)
    first, second = ring.take(), ring.take()
    assert {first, second} == {0, 1}
    assert ring.free == 0
    ring.give_back(first)
    assert ring.free == 1
    assert ring.take() == first


def test_buffers_do_not_overlap():
    ring = StagingRing(2, 64)
    one, two = ring.buffer(ring.take()), ring.buffer(ring.take())
    one.fill_(1)
    two.fill_(2)
    assert int(one.sum()) == 64


def test_giving_back_twice_and_using_a_free_buffer_are_bugs():
    ring = StagingRing(1, 64)
    index = ring.take()
    ring.give_back(index)
    with pytest.raises(AssertionError, match="not taken"):
        ring.give_back(index)
    with pytest.raises(AssertionError, match="not taken"):
        ring.buffer(index)
