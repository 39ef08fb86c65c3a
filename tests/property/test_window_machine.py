"""A KV cache with a sliding window against a naive model, with K/V that says whose it is.

After every step: each owner of each slot is the model's; every position that a live request still
reads has the K/V of its tokens; no request holds much that is left of its window; matches are the
longest usable ones; evictions take what a scan of the tree says; all ledger checks hold; events
add up. Slots that are free are overwritten, as the next owner would.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from kvferry.cache_key import Sharing
from kvferry.config import EvictionPolicy
from mem_cache.errors import OutOfSlots
from mem_cache.window_radix_cache import WindowRadixCache
from tests.support.kv_caches import SHARED, read_stamps, tiny_cache, write_stamps
from tests.support.kv_model import apply_events
from tests.support.state_machines import run_machine
from tests.support.window_model import (
    Live,
    PageKey,
    WindowModel,
    assert_shape,
    expected_eviction,
    tree_pages,
)

pytestmark = pytest.mark.property

ROWS = 4
PAGES = {1: 24, 4: 24, 16: 16, 64: 10}
STEPS = 40
CI_EXAMPLES, SLOW_EXAMPLES = 4, 70
CI_SEEDS = range(3, 20)
"""Tried in turn until the sample is worth something."""

SETTINGS = [(1, 2), (1, 7), (4, 3), (4, 4), (4, 11), (16, 8), (16, 40), (64, 64), (64, 200)]
"""Page size and window: smaller than, equal to and larger than a page."""

WORTH_SEEING_WITHOUT_TREE = {
    "out of slots",
    "adopted",
    "pinned window",
    "inbound window",
    "own slots given up",
    "forked",
}
WORTH_SEEING = WORTH_SEEING_WITHOUT_TREE | {"hit", "duplicate", "evicted", "unlocked", "tombstone"}
"""What a sample must contain to have tested anything."""


class WindowMachine(RuleBasedStateMachine):
    """One worker's KV under requests of every kind."""

    def __init__(self, page_size: int, window: int, radix: bool, seen: Counter[str]) -> None:
        super().__init__()
        self.pages = PAGES[page_size]
        context = 4 * self.pages * page_size
        self.cache = tiny_cache(
            page_size,
            pages=self.pages,
            rows=ROWS,
            radix=radix,
            auditing=False,
            context_length=context,
            window=window,
        )
        self.radix = radix
        self.page_size = page_size
        self.model = WindowModel(page_size, window)
        self.free = set(range(page_size, page_size * (self.pages + 1)))
        self.live: list[Live] = []
        self.view: set[int] = set()
        self.opened = 0
        self.seen = seen
        if radix:
            self._watch_evictions()

    def _watch_evictions(self) -> None:
        tree = self.cache.tree
        assert isinstance(tree, WindowRadixCache)
        evict = tree.evict

        def watched(num_tokens: int) -> np.ndarray:
            nodes = expected_eviction(tree, EvictionPolicy.LRU, num_tokens)
            expected = [slot for node in nodes for slot in node.value.tolist()]
            slots = evict(num_tokens)
            assert slots.tolist() == expected
            self._forget(set(expected))
            return slots

        tree.evict = watched  # type: ignore[method-assign]

    def _forget(self, gone: set[int]) -> None:
        pages = self.model.pages
        locked = {slot for key in self._locked() for slot in pages[key]}
        assert not gone & locked, "cache in use was evicted"
        self.model.pages = {k: v for k, v in pages.items() if not gone & set(v)}
        self.free |= gone
        self.seen["evicted"] += 1

    # --- the model's requests ---------------------------------------------------------------

    def _keys(self, request: Live, start: int, stop: int) -> list[PageKey]:
        keys = self.model.keys(SHARED, request.tokens, stop)
        return keys[start // self.page_size : stop // self.page_size]

    def _locked(self) -> set[PageKey]:
        return {
            key
            for request in self.live
            if request.protected > request.start
            for key in self._keys(request, request.start, request.protected)
        }

    def _evictable(self) -> int:
        return self.page_size * len(self.model.pages.keys() - self._locked())

    def _slide(self, request: Live) -> None:
        start = self.model.needed_from(request.committed)
        if start - request.start < self.cache.window.stride:
            return
        if request.pins or request.inbound:
            self.seen["pinned window" if request.pins else "inbound window"] += 1
            return
        if start > request.protected:
            self.seen["own slots given up"] += 1
            self.free |= set(request.slots[request.protected : start])
        self.seen["unlocked"] += request.protected > request.start
        request.slots[request.start : start] = [0] * (start - request.start)
        request.start = start
        request.protected = max(request.protected, start)

    def _checkpointed(self, request: Live, up_to: int) -> None:
        key_len = up_to // self.page_size * self.page_size
        if not (self.radix and request.shared) or key_len <= request.protected:
            return
        tokens = request.tokens[:key_len]
        own = self._keys(request, request.protected, key_len)
        if request.pins and any(key in self.model.pages for key in own):
            self.seen["put off"] += 1
            return
        duplicates = self.model.insert(SHARED, tokens, request.slots, request.protected)
        self.seen["duplicate"] += bool(duplicates)
        self.free |= set(duplicates)
        keys = self._keys(request, request.protected, key_len)
        request.slots[request.protected : key_len] = [s for k in keys for s in self.model.pages[k]]
        request.protected = key_len

    # --- choices ----------------------------------------------------------------------------

    def _length(self, data: st.DataObject, low: int, high: int) -> int:
        """A length in [low, high], often at or beside the end of a page."""
        size = self.page_size
        pages = data.draw(st.sampled_from(range(low // size, high // size + 1)), label="pages")
        offset = data.draw(st.sampled_from((0, 1, size - 1, size // 2)), label="offset")
        return max(low, min(high, pages * size + offset))

    def _prompt(self, data: st.DataObject) -> np.ndarray:
        """One of two texts up to a fork, then one of three others: most prompts share pages."""
        length = self._length(data, 1, self.pages * self.page_size // 2)
        fork = data.draw(st.sampled_from(range(self.pages // 2 + 1)), label="fork")
        text = data.draw(st.sampled_from((0, 0, 1)), label="text")
        tail = data.draw(st.sampled_from((2, 3, 4)), label="tail")
        kinds = np.where(np.arange(self.pages) < fork, text, tail).astype(np.int32)
        return np.repeat(kinds, self.page_size)[:length]

    def _request(self, data: st.DataObject) -> Live:
        return data.draw(st.sampled_from(self.live), label="request")

    # --- what rules are made of -------------------------------------------------------------

    def _open(self, prompt: np.ndarray, *, inbound: bool = False, shared: bool = True) -> Live:
        name = f"r{self.opened}"
        self.opened += 1
        hit = 0
        if shared and self.radix:
            hit = self.model.match_len(SHARED, prompt if inbound else prompt[:-1])
        start = self.model.needed_from(hit)
        sharing = Sharing.SHARED if shared else Sharing.PRIVATE
        kv = self.cache.open(name, prompt, SHARED, inbound=inbound, sharing=sharing)
        seed = SHARED if shared else name
        request = Live(kv, prompt, seed, shared, inbound, [0] * start, start, hit, hit)
        request.slots += [s for k in self._keys(request, start, hit) for s in self.model.pages[k]]
        assert kv.prefix_len == hit
        self.live.append(request)
        self.seen["hit"] += hit > 0
        return request

    def _extend(self, request: Live, new_len: int) -> bool:
        """Whether there were slots; if not, nothing changed but the window."""
        if new_len > len(request.tokens):
            tail = np.resize(request.tokens[-3:] ^ 1, new_len - len(request.tokens))
            request.tokens = np.concatenate([request.tokens, tail]).astype(np.int32)
        self._slide(request)
        rounded = -(-new_len // self.page_size) * self.page_size
        needed = max(0, rounded - len(request.slots))
        if needed > len(self.free) + self._evictable():
            with pytest.raises(OutOfSlots, match="KV slots needed"):
                self.cache.extend(request.kv, new_len)
            self.seen["out of slots"] += 1
            return False
        given = self.cache.extend(request.kv, new_len)
        row = self._row(request)
        fresh = row[len(request.slots) :]
        assert len(fresh) == needed
        assert set(fresh) <= self.free, "slots were given that somebody owns"
        self.free -= set(fresh)
        request.slots += fresh
        assert given.tolist() == row[request.committed : new_len]
        return True

    def _row(self, request: Live) -> list[int]:
        row = request.kv.req_pool_idx
        assert row is not None
        return self.cache.rows.read(row, 0, request.kv.allocated_len).tolist()

    def _compute(self, request: Live, new_len: int) -> None:
        """Write the K/V of positions that have slots, as a forward or a scatter would."""
        slots = self.cache.slots(request.kv, request.committed, new_len)
        write_stamps(self.cache, slots, request.stamps()[request.committed : new_len])
        self.cache.commit(request.kv, new_len)
        request.committed = new_len

    def _checkpoint(self, request: Live, up_to: int) -> None:
        self.cache.checkpoint(request.kv, request.tokens[:up_to])
        self._checkpointed(request, up_to)

    def _release(self, request: Live, *, publish: bool) -> None:
        self.cache.release(request.kv, request.tokens if publish else None)
        if publish and not request.inbound:
            self._checkpointed(request, request.committed)
        self.free |= set(request.slots[request.protected :])
        self.live.remove(request)

    # --- rules ------------------------------------------------------------------------------

    @precondition(lambda self: len(self.live) < ROWS)
    @rule(data=st.data(), inbound=st.booleans(), shared=st.sampled_from((True, True, False)))
    def open(self, data, inbound, shared):
        self._open(self._prompt(data), inbound=inbound, shared=shared)

    @precondition(lambda self: len(self.live) < ROWS)
    @rule(data=st.data(), chunk_pages=st.sampled_from((1, 2, 5, 20)), checkpoints=st.booleans())
    def serve(self, data, chunk_pages, checkpoints):
        """A whole request, in chunks, between two steps of the others."""
        prompt = self._prompt(data)
        request = self._open(prompt)
        while request.committed < len(prompt):
            stop = min(len(prompt), request.committed + chunk_pages * self.page_size)
            if not self._extend(request, stop):
                break
            self._compute(request, stop)
            if checkpoints:
                self._checkpoint(request, stop)
        self._release(request, publish=True)

    @precondition(lambda self: len(self.live) <= ROWS - 2)
    @rule(data=st.data(), stays=st.booleans())
    def race(self, data, stays):
        """Two requests compute the same prompt; the second to publish finds duplicates."""
        prompt = self._prompt(data)
        pair = [self._open(prompt), self._open(prompt)]
        for request in pair:
            if self._extend(request, len(prompt)):
                self._compute(request, len(prompt))
        for request in pair:
            self._checkpoint(request, request.committed)
        self._release(pair[0], publish=True)
        if not stays:
            self._release(pair[1], publish=False)

    @precondition(lambda self: len(self.live) < ROWS)
    @rule(data=st.data(), aborted=st.booleans())
    def handoff(self, data, aborted):
        """A prompt arrives in two chunks, or in one and the handoff is aborted."""
        prompt = self._prompt(data)
        request = self._open(prompt, inbound=True)
        half = self._length(data, request.committed, len(prompt))
        for stop in (half, len(prompt)):
            if not self._extend(request, stop) or (aborted and stop > half):
                self._release(request, publish=True)
                return
            self._compute(request, stop)
        self.cache.adopt(request.kv)
        request.inbound = False
        self._checkpoint(request, len(prompt))
        self.seen["adopted"] += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def extend(self, data):
        request = self._request(data)
        high = min(self.cache.context_length, request.committed + self.pages * self.page_size)
        self._extend(request, self._length(data, request.committed, high))

    @precondition(lambda self: any(r.committed < len(r.slots) for r in self.live))
    @rule(data=st.data())
    def compute(self, data):
        ready = [r for r in self.live if r.committed < len(r.slots)]
        request = data.draw(st.sampled_from(ready), label="request")
        high = max(request.committed, min(len(request.slots), len(request.tokens)))
        self._compute(request, self._length(data, request.committed, high))

    @precondition(lambda self: any(not r.inbound for r in self.live))
    @rule(data=st.data(), tokens=st.sampled_from((1, 3, 17, 70)), publish=st.booleans())
    def decode(self, data, tokens, publish):
        request = data.draw(st.sampled_from([r for r in self.live if not r.inbound]))
        self._decode(request, tokens)
        if publish:
            self._checkpoint(request, request.committed)

    def _decode(self, request: Live, tokens: int) -> None:
        """Token by token, maybe far beyond the window: what is held is bounded."""
        for _ in range(tokens):
            new_len = request.committed + 1
            if new_len > self.cache.context_length or not self._extend(request, new_len):
                return
            if not request.pins:
                held = request.committed - max(request.start, request.protected)
                stride = self.cache.window.stride
                assert held < self.model.window + stride + self.page_size
            self._compute(request, new_len)

    @precondition(lambda self: any(not r.inbound for r in self.live))
    @rule(data=st.data())
    def checkpoint(self, data):
        request = data.draw(st.sampled_from([r for r in self.live if not r.inbound]))
        self._checkpoint(request, self._length(data, 0, request.committed))

    @precondition(lambda self: any(r.inbound for r in self.live))
    @rule(data=st.data())
    def adopt(self, data):
        request = data.draw(st.sampled_from([r for r in self.live if r.inbound]))
        self.cache.adopt(request.kv)
        request.inbound = False

    @precondition(lambda self: any(not r.inbound for r in self.live))
    @rule(data=st.data(), tokens=st.sampled_from((0, 3, 17, 70)))
    def pin(self, data, tokens):
        request = data.draw(st.sampled_from([r for r in self.live if not r.inbound]))
        self.cache.pin(request.kv)
        request.pins += 1
        self._decode(request, tokens)

    @precondition(lambda self: any(r.pins for r in self.live))
    @rule(data=st.data())
    def unpin(self, data):
        request = data.draw(st.sampled_from([r for r in self.live if r.pins]))
        self.cache.unpin(request.kv)
        request.pins -= 1

    @precondition(lambda self: len(self.live) < ROWS)
    @precondition(lambda self: any(not r.inbound for r in self.live))
    @rule(data=st.data(), tokens=st.sampled_from((0, 1, 17)), publish=st.booleans())
    def fork(self, data, tokens, publish):
        """Another sample of what a request has computed, which goes its own way."""
        parent = data.draw(st.sampled_from([r for r in self.live if not r.inbound]))
        if publish:
            self._checkpoint(parent, parent.committed)
        pages = -(-parent.committed // self.page_size)
        if pages * self.page_size - parent.protected > len(self.free) + self._evictable():
            with pytest.raises(OutOfSlots, match="KV slots needed"):
                self.cache.fork(parent.kv, "too much")
            return
        kv = self.cache.fork(parent.kv, "twin")
        twin = replace(parent, kv=kv, pins=0, tokens=parent.tokens[: parent.committed])
        twin.slots = self._row(twin)
        assert len(twin.slots) == pages * self.page_size
        assert twin.slots[: twin.protected] == parent.slots[: twin.protected]
        assert set(twin.slots[twin.protected :]) <= self.free, "somebody owns them"
        self.free -= set(twin.slots[twin.protected :])
        self.live.append(twin)
        self.seen["forked"] += 1
        self._decode(twin, tokens)

    @precondition(lambda self: any(not r.pins for r in self.live))
    @rule(data=st.data(), publish=st.booleans())
    def release(self, data, publish):
        request = data.draw(st.sampled_from([r for r in self.live if not r.pins]))
        self._release(request, publish=publish)

    @precondition(lambda self: not self.live)
    @rule()
    def drop_cache(self):
        self.cache.drop_cache()
        self.free |= {slot for slots in self.model.pages.values() for slot in slots}
        self.model.pages.clear()

    @rule()
    def audit(self):
        """Always possible."""
        self.cache.audit()

    # --- after every step -------------------------------------------------------------------

    @invariant()
    def owners_are_the_models(self):
        self.seen["step"] += 1
        self.cache.audit()
        assert set(self.cache.allocator.free_slots().tolist()) == self.free
        for request in self.live:
            kv = request.kv
            lengths = (kv.window_start, kv.cache_protected_len, kv.committed_len, kv.pins)
            wanted = (request.start, request.protected, request.committed, request.pins)
            assert lengths == wanted
            assert self._row(request) == request.slots
        accounts = self.cache.accounts()
        own = {True: 0, False: 0}
        for request in self.live:
            own[request.inbound] += len(request.slots) - request.protected
        assert (accounts.private, accounts.inbound) == (own[False], own[True])
        assert accounts.evictable == self._evictable()
        assert accounts.protected == self.page_size * len(self._locked())
        pinned = {slot for r in self.live if r.pins for slot in r.slots if slot}
        assert accounts.outbound_pinned == len(pinned)

    @invariant()
    def tree_is_the_models(self):
        tree = self.cache.tree
        if not isinstance(tree, WindowRadixCache):
            assert not self.radix
            return
        assert tree_pages(tree) == self.model.pages
        assert_shape(tree, [(r.kv.last_node, r.kv.window_start) for r in self.live])
        self.seen["tombstone"] += any(not node.on_device for node in tree.nodes())
        apply_events(self.view, self.cache.take_events())
        assert self.view == set(self.cache.snapshot_blocks()) == self.model.block_hashes()

    @invariant()
    def the_window_reads_its_tokens(self):
        free = np.asarray(sorted(self.free), dtype=np.int64)
        write_stamps(self.cache, free, np.full((len(free), 2), -1.0, dtype=np.float32))
        for request in self.live:
            start = self.model.needed_from(request.committed)
            slots = self.cache.slots(request.kv, start, request.committed)
            expected = request.stamps()[start : request.committed]
            for layer in read_stamps(self.cache, slots):
                np.testing.assert_array_equal(layer[0], expected)
                np.testing.assert_array_equal(layer[1], -expected)

    def teardown(self) -> None:
        for request in list(self.live):
            for _ in range(request.pins):
                self.cache.unpin(request.kv)
            self.cache.release(request.kv, None)
        self.cache.audit()
        assert self.cache.accounts().is_idle


def _run(page_size: int, window: int, radix: bool, examples: int, seed: int | None) -> Counter[str]:
    """Run the machine; returns what happened how often."""
    seen: Counter[str] = Counter()

    def machine() -> WindowMachine:
        return WindowMachine(page_size, window, radix, seen)

    run_machine(machine, examples=examples, steps=STEPS, seed=seed)
    return seen


@pytest.mark.parametrize(("page_size", "window"), SETTINGS)
def test_agrees_with_the_model(page_size, window):
    seen: Counter[str] = Counter()
    for seed in CI_SEEDS:
        seen += _run(page_size, window, True, CI_EXAMPLES, seed)
        if set(seen) >= WORTH_SEEING:
            break
    assert set(seen) >= WORTH_SEEING, seen


def test_agrees_with_the_model_without_an_index():
    seen: Counter[str] = Counter()
    for seed in CI_SEEDS:
        seen += _run(4, 11, False, CI_EXAMPLES, seed)
        if set(seen) >= WORTH_SEEING_WITHOUT_TREE:
            break
    assert set(seen) >= WORTH_SEEING_WITHOUT_TREE, seen


@pytest.mark.slow
@pytest.mark.parametrize(("page_size", "window"), SETTINGS)
def test_agrees_with_the_model_for_3000_steps(page_size, window):
    seen: Counter[str] = Counter()
    for radix in (True, False):
        seen += _run(page_size, window, radix, SLOW_EXAMPLES, seed=None)
    assert seen["step"] >= 3_000
    assert set(seen) >= WORTH_SEEING, seen
