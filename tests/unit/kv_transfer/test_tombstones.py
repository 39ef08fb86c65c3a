from __future__ import annotations

import pytest

from kv_transfer.protocol.key import HandoffKey
from kv_transfer.protocol.tombstones import Tombstones
from kvferry.ids import Attempt, Incarnation, RequestId


def key(name: str, attempt: int = 1) -> HandoffKey:
    return HandoffKey(RequestId(name), Attempt(attempt), Incarnation(1), Incarnation(2))


def test_keys_are_compared_whole():
    stones: Tombstones[str] = Tombstones()
    stones.bury(key("r1"), "closed")
    assert stones.outcome(key("r1")) == "closed"
    assert key("r10") not in stones
    assert key("r1", attempt=2) not in stones


def test_the_oldest_is_forgotten():
    stones: Tombstones[str] = Tombstones(capacity=2)
    for name in ("a", "b", "c"):
        stones.bury(key(name), "closed")
    assert len(stones) == 2
    assert stones.outcome(key("a")) is None


def test_a_handoff_ends_once():
    stones: Tombstones[str] = Tombstones()
    stones.bury(key("a"), "closed")
    with pytest.raises(AssertionError, match="ended twice"):
        stones.bury(key("a"), "aborted")
