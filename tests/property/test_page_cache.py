"""A cache of page ids does what a cache of tokens does: the same hits, slots and evictions."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvferry.config import EvictionPolicy, KvDType
from kvferry.ids import ExtraKey
from kvferry.kv_events import BlocksRemoved, BlocksStored
from mem_cache.errors import OutOfSlots
from mem_cache.kv_cache import KVCache
from mem_cache.layout import KvLayout
from mem_cache.radix_cache import RadixCache
from mem_cache.req_to_token_pool import ReqToTokenPool
from mem_cache.slot_allocator import PagedTokenToKVPoolAllocator
from simulator.page_cache import page_cache

PAGE, PAGES, ROWS, CONTEXT = 4, 12, 4, 10
SHARED = ExtraKey("")


class Bytes(NamedTuple):
    layout: KvLayout = KvLayout(1, 1, 2, KvDType.FLOAT32, page_size=PAGE)


class Step(NamedTuple):
    prompt: list[int]
    """Ids of its pages."""
    rest: int
    """Tokens behind the last full page."""
    parts: int
    keeps: bool
    """It holds its pages until the fourth after it ends."""


STEPS = st.lists(
    st.builds(
        Step,
        st.lists(st.integers(1, 3), min_size=1, max_size=6),
        st.integers(0, PAGE - 1),
        st.integers(1, 3),
        st.booleans(),
    ),
    max_size=25,
)


class Pair:
    """One of tokens and one of pages, which are asked for the same."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.tokens = KVCache(
            Bytes(),
            ReqToTokenPool(ROWS, CONTEXT * PAGE),
            PagedTokenToKVPoolAllocator(PAGES * PAGE, PAGE),
            RadixCache(PAGE, PAGE, policy),
            None,
            context_length=CONTEXT * PAGE,
        )
        self.pages = page_cache(PAGES, ROWS, CONTEXT, policy)
        self.names: dict[int, int] = {}
        """Hashes of the one by those of the other."""
        self.held = []

    def compute(self, step: Step) -> None:
        if len(self.held) == ROWS - 1:
            self.release()
        tokens = np.repeat(np.array(step.prompt, dtype=np.int32), PAGE)
        tokens = np.append(tokens, np.full(step.rest, 9, dtype=np.int32))
        ids = np.append(np.array(step.prompt, dtype=np.int32), np.int32(0))
        ours = self.tokens.open("", tokens, SHARED)
        theirs = self.pages.open("", ids[: (tokens.size - 1) // PAGE + 1], SHARED)
        assert ours.prefix_len == theirs.prefix_len * PAGE
        is_whole = True
        start = ours.prefix_len
        for part in range(1, step.parts + 1):
            stop = start + (tokens.size - start) * part // step.parts
            is_whole = self.extend(ours, theirs, stop)
            if not is_whole:
                break
            self.tokens.commit(ours, stop)
            self.pages.commit(theirs, max(theirs.committed_len, stop // PAGE))
            self.tokens.checkpoint(ours, tokens[:stop])
            self.pages.checkpoint(theirs, ids[: stop // PAGE])
            self.check()
        self.held.append((ours, theirs, tokens, ids))
        if not (step.keeps and is_whole):
            self.release(-1)

    def extend(self, ours, theirs, stop) -> bool:
        outcomes = []
        for cache, kv, length in (
            (self.tokens, ours, stop),
            (self.pages, theirs, -(-stop // PAGE)),
        ):
            try:
                cache.extend(kv, length)
                outcomes.append(True)
            except OutOfSlots:
                outcomes.append(False)
        assert outcomes[0] == outcomes[1]
        return outcomes[0]

    def release(self, number: int = 0) -> None:
        ours, theirs, tokens, ids = self.held.pop(number)
        done = ours.committed_len
        self.tokens.release(ours, tokens[:done])
        self.pages.release(theirs, ids[: done // PAGE])
        self.check()

    def check(self) -> None:
        ours, theirs = self.tokens.accounts(), self.pages.accounts()
        for name in ("free", "evictable", "protected", "private"):
            assert getattr(ours, name) == PAGE * getattr(theirs, name), name
        for one, other in zip(self.tokens.take_events(), self.pages.take_events(), strict=True):
            assert type(one) is type(other)
            assert isinstance(one, BlocksStored | BlocksRemoved)
            for name, other_name in zip(one.block_hashes, other.block_hashes, strict=True):
                assert self.names.setdefault(name, other_name) == other_name


@given(STEPS, st.sampled_from(list(EvictionPolicy)))
def test_pages_as_tokens_change_nothing(steps, policy):
    pair = Pair(policy)
    for step in steps:
        pair.compute(step)
    while pair.held:
        pair.release()
    pair.tokens.audit()
    pair.pages.audit()
