"""The prefix index against a naive model, over lossy, doubled and restarted event streams."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvferry.ids import Incarnation, WorkerId
from kvferry.kv_events import AllBlocksCleared, BlockHash, BlocksRemoved, BlocksStored, KvEventBatch
from router.prefix_index import EventGap, PrefixIndex

WORKER = WorkerId("w")
CHAINS = 3
DEPTH = 6


def chain(number: int) -> list[BlockHash]:
    return [BlockHash(100 * number + depth) for depth in range(DEPTH)]


class IndexMachine(RuleBasedStateMachine):
    """A worker holds a prefix of each of some chains; its events reach the index or do not."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.index.join(WORKER, Incarnation(1))
        self.held = [0] * CHAINS
        self.incarnation = 1
        self.sequence = 0
        self.is_following = False
        self.last: KvEventBatch | None = None

    def batch(self, *events: object, snapshot: bool = False) -> KvEventBatch:
        return KvEventBatch(WORKER, Incarnation(self.incarnation), self.sequence, snapshot, events)  # type: ignore[arg-type]

    def send(self, batch: KvEventBatch, delivered: bool) -> None:
        if not delivered:
            self.is_following = False
            return
        try:
            self.index.apply(batch)
        except EventGap:
            assert not self.is_following, "a gap was seen where there is none"
        self.last = batch

    @rule(number=st.integers(0, CHAINS - 1), depth=st.integers(0, DEPTH), delivered=st.booleans())
    def change(self, number: int, depth: int, delivered: bool) -> None:
        self.sequence += 1
        hashes = chain(number)
        before, self.held[number] = self.held[number], depth
        low, high = sorted((before, depth))
        kind = BlocksStored if depth >= before else BlocksRemoved
        self.send(self.batch(kind(tuple(hashes[low:high]))), delivered)

    @rule(delivered=st.booleans())
    def clear(self, delivered: bool) -> None:
        self.sequence += 1
        self.held = [0] * CHAINS
        self.send(self.batch(AllBlocksCleared()), delivered)

    @rule()
    def snapshot(self) -> None:
        blocks = [block for n in range(CHAINS) for block in chain(n)[: self.held[n]]]
        self.is_following = True
        self.send(self.batch(BlocksStored(tuple(blocks)), snapshot=True), True)

    @rule()
    def repeat(self) -> None:
        if self.last is not None and not self.last.snapshot:
            self.send(self.last, True)

    @rule()
    def restart(self) -> None:
        self.incarnation += 1
        self.sequence = 0
        self.held = [0] * CHAINS
        self.is_following = False
        self.last = None
        self.index.join(WORKER, Incarnation(self.incarnation))

    @invariant()
    def hits_are_exact_while_following(self) -> None:
        for number in range(CHAINS):
            hit = self.index.hit_blocks(WORKER, chain(number))
            assert not self.is_following or hit == self.held[number]


@pytest.mark.property
class TestIndexMachine(IndexMachine.TestCase):  # type: ignore[misc]
    settings = settings(stateful_step_count=30)
