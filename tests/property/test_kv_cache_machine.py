"""Rows, allocator, tree and requests against a naive model, with K/V that says whose it is.

After every step: each owner of each slot is the model's, all ledger checks hold, each live row
reads exactly the values of its tokens, and the KV events add up to what the tree holds. Slots
that are free are overwritten, as the next owner would, so that nobody can read them unnoticed.
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
from kvferry.ids import ExtraKey
from mem_cache.errors import OutOfRows, OutOfSlots
from tests.support.kv_caches import PAGE_SIZES, read_stamps, tiny_cache, write_stamps
from tests.support.kv_model import KvModel, ModelRequest, apply_events, tree_pages
from tests.support.state_machines import run_machine

pytestmark = pytest.mark.property

ROWS = 4
PAGES = {1: 40, 4: 16, 16: 10, 64: 8}
STEPS = 50
CI_EXAMPLES, SLOW_EXAMPLES = 5, 60
CI_SEEDS = range(3, 20)
"""Tried in turn until the sample is worth something: a few examples may be all alike."""

WORTH_SEEING_WITHOUT_TREE = {"out of slots", "adopted", "pinned", "forked", "trimmed"}
WORTH_SEEING = WORTH_SEEING_WITHOUT_TREE | {"hit", "duplicate", "evicted", "split", "put off"}
"""What a sample must contain to have tested anything."""


class KvCacheMachine(RuleBasedStateMachine):
    """One worker's KV under requests of every kind."""

    def __init__(self, page_size: int, radix: bool, seen: Counter[str]) -> None:
        super().__init__()
        self.cache = tiny_cache(
            page_size, pages=PAGES[page_size], rows=ROWS, radix=radix, auditing=False
        )
        self.model = KvModel(page_size, self.cache.num_slots, ROWS, radix)
        self.routers_view: set[int] = set()
        self.opened = 0
        self.seen = seen

    # --- choices ----------------------------------------------------------------------------
    # Drawn from lists, because lists are sampled evenly; integers tend to be small.

    def _length(self, data: st.DataObject, low: int, high: int) -> int:
        """A length in [low, high], often at or beside the end of a page."""
        size = self.model.page_size
        pages = data.draw(st.sampled_from(range(low // size, high // size + 1)), label="pages")
        offset = data.draw(st.sampled_from((0, 1, size - 1, size // 2)), label="offset")
        return max(low, min(high, pages * size + offset))

    def _prompt(self, data: st.DataObject) -> np.ndarray:
        """One of two texts up to a fork, then one of three others: most prompts share pages."""
        size = self.model.page_size
        pages = self.cache.num_slots // size
        length = self._length(data, 1, self.cache.num_slots // 2)
        text = data.draw(st.sampled_from((0, 0, 1)), label="text")
        fork = data.draw(st.sampled_from(range(pages // 2 + 1)), label="fork")
        tail = data.draw(st.sampled_from((2, 3, 4)), label="tail")
        kinds = np.where(np.arange(pages) < fork, text, tail).astype(np.int32)
        return np.repeat(kinds, size)[:length]

    def _request(self, data: st.DataObject) -> ModelRequest:
        return data.draw(st.sampled_from(self.model.live), label="request")

    def _frozen(self) -> object:
        """Everything that an operation which fails must leave alone."""
        cache = self.cache
        kvs = cache.live_requests()
        return (
            sorted(cache.allocator.free_slots().tolist()),
            tree_pages(cache),
            cache.accounts(),
            cache.rows.free_rows(),
            [(repr(kv), cache.slots(kv, 0, kv.allocated_len).tolist()) for kv in kvs],
        )

    # --- what rules are made of -------------------------------------------------------------

    def _open(self, prompt, extra, *, inbound=False, shareable=True) -> ModelRequest:
        key, name = ExtraKey(extra), f"r{self.opened}"
        self.opened += 1
        sharing = Sharing.SHARED if shareable else Sharing.PRIVATE
        kv = self.cache.open(name, prompt, key, inbound=inbound, sharing=sharing)
        # What is not shared has K/V of its own for the same tokens.
        seed = extra if shareable else name
        request = ModelRequest(kv, key, seed, shareable, inbound, prompt, [], 0, 0)
        self.model.opened(request)
        assert kv.prefix_len == request.protected <= len(prompt) - (not inbound)
        self.seen["hit"] += kv.prefix_len > 0
        return request

    def _extend(self, request: ModelRequest, new_len: int) -> bool:
        """Whether there were slots; if not, nothing changed."""
        if new_len > len(request.tokens):
            tail = np.resize(request.tokens[-3:] ^ 1, new_len - len(request.tokens))
            request.tokens = np.concatenate([request.tokens, tail]).astype(np.int32)
        shortage = self.model.slots_needed(request, new_len) - len(self.model.free)
        if shortage > self.model.evictable_slots():
            before = self._frozen()
            with pytest.raises(OutOfSlots, match="KV slots needed"):
                self.cache.extend(request.kv, new_len)
            assert self._frozen() == before
            self.seen["out of slots"] += 1
            return False
        self.seen["evicted"] += shortage > 0
        given = self.cache.extend(request.kv, new_len)
        self.model.evicted(tree_pages(self.cache), shortage)
        needed = self.model.slots_needed(request, new_len)
        row = self.cache.slots(request.kv, 0, request.kv.allocated_len).tolist()
        assert len(row) == len(request.slots) + needed
        self.model.extended(request, row)
        assert given.tolist() == row[request.committed : new_len]
        return True

    def _compute(self, request: ModelRequest, new_len: int) -> None:
        """Write the K/V of positions that have slots, as a forward or a scatter would."""
        slots = self.cache.slots(request.kv, request.committed, new_len)
        write_stamps(self.cache, slots, request.stamps()[request.committed : new_len])
        self.cache.commit(request.kv, new_len)
        request.committed = new_len

    def _checkpoint(self, request: ModelRequest, up_to: int) -> None:
        free = len(self.model.free)
        self.cache.checkpoint(request.kv, request.tokens[:up_to])
        self.seen["put off"] += self.model.is_put_off(request, up_to)
        self.model.checkpointed(request, up_to)
        self.seen["duplicate"] += len(self.model.free) > free

    def _fork(self, parent: ModelRequest) -> ModelRequest | None:
        """None, with nothing changed, if there were no slots."""
        name = f"r{self.opened}"
        self.opened += 1
        shortage = self.model.fork_slots(parent) - len(self.model.free)
        if shortage > self.model.evictable_slots():
            before = self._frozen()
            with pytest.raises(OutOfSlots, match="KV slots needed"):
                self.cache.fork(parent.kv, name)
            assert self._frozen() == before
            return None
        self.seen["evicted"] += shortage > 0
        kv = self.cache.fork(parent.kv, name)
        self.model.evicted(tree_pages(self.cache), shortage)
        twin = replace(parent, kv=kv, pins=0)
        row = self.cache.slots(kv, 0, kv.allocated_len).tolist()
        self.model.forked(parent, twin, row)
        self.seen["forked"] += parent.committed > parent.protected
        return twin

    def _pin(self, request: ModelRequest) -> None:
        self.cache.pin(request.kv)
        request.pins += 1
        if request.pins == 1:
            request.noted = request.slots[: request.committed]

    def _release(self, request: ModelRequest, publish: bool) -> None:
        tokens = request.tokens if publish else None
        self.cache.release(request.kv, tokens)
        self.model.released(request, publish)
        with pytest.raises(AssertionError, match="check 6"):
            self.cache.release(request.kv, tokens)

    # --- rules ------------------------------------------------------------------------------

    @precondition(lambda self: len(self.model.live) < ROWS)
    @rule(
        data=st.data(),
        extra=st.sampled_from(("", "", "", "adapter")),
        inbound=st.booleans(),
        shareable=st.sampled_from((True, True, True, False)),
    )
    def open(self, data, extra, inbound, shareable):
        self._open(self._prompt(data), extra, inbound=inbound, shareable=shareable)

    @precondition(lambda self: len(self.model.live) == ROWS)
    @rule(data=st.data())
    def open_without_a_row(self, data):
        prompt, before = self._prompt(data), self._frozen()
        with pytest.raises(OutOfRows, match="rows: 0 free"):
            self.cache.open("one too many", prompt, ExtraKey(""))
        assert self._frozen() == before

    @precondition(lambda self: len(self.model.live) < ROWS)
    @rule(data=st.data(), extra=st.sampled_from(("", "", "adapter")))
    def serve(self, data, extra):
        """A whole request between two steps of the others."""
        prompt = self._prompt(data)
        request = self._open(prompt, extra)
        if self._extend(request, len(prompt)):
            self._compute(request, len(prompt))
        self._release(request, publish=True)

    @precondition(lambda self: len(self.model.live) <= ROWS - 2)
    @rule(data=st.data(), stays=st.booleans(), pinned=st.booleans())
    def race(self, data, stays, pinned):
        """Two requests compute the same prompt; the second to publish finds duplicates, and
        puts it off if a handoff reads it.
        """
        prompt = self._prompt(data)
        pair = [self._open(prompt, ""), self._open(prompt, "")]
        for request in pair:
            if self._extend(request, len(prompt)):
                self._compute(request, len(prompt))
        if pinned:
            self._pin(pair[1])
        for request in pair:
            self._checkpoint(request, request.committed)
        self._release(pair[0], publish=True)
        if pinned and not stays:
            self._unpin(pair[1])
        if not stays:
            self._release(pair[1], publish=False)

    @precondition(lambda self: len(self.model.live) < ROWS)
    @rule(data=st.data(), aborted=st.booleans())
    def handoff(self, data, aborted):
        """A prompt arrives in two chunks, or in one and the handoff is aborted."""
        prompt = self._prompt(data)
        request = self._open(prompt, "", inbound=True)
        if not self._extend(request, len(prompt)):
            self._release(request, publish=True)
            return
        self._compute(request, self._length(data, request.committed, len(prompt)))
        if aborted:
            self._release(request, publish=True)
            return
        self._compute(request, len(prompt))
        self.cache.adopt(request.kv)
        request.inbound = False
        self._checkpoint(request, len(prompt))
        self.seen["adopted"] += 1

    @precondition(lambda self: self.model.live)
    @rule(data=st.data())
    def extend(self, data):
        request = self._request(data)
        room = min(self.cache.num_slots, request.committed + 3 * self.cache.num_slots // 4)
        self._extend(request, self._length(data, request.committed, room))

    @precondition(lambda self: any(r.committed < len(r.slots) for r in self.model.live))
    @rule(data=st.data())
    def compute(self, data):
        ready = [r for r in self.model.live if r.committed < len(r.slots)]
        request = data.draw(st.sampled_from(ready), label="request")
        high = max(request.committed, min(len(request.slots), len(request.tokens)))
        self._compute(request, self._length(data, request.committed, high))

    @precondition(lambda self: any(not r.inbound for r in self.model.live))
    @rule(data=st.data())
    def trim(self, data):
        """Guesses were computed, if at all, and were wrong."""
        live = [r for r in self.model.live if not r.inbound]
        request = data.draw(st.sampled_from(live), label="request")
        had = len(self.model.free)
        self.cache.trim(request.kv)
        self.model.trimmed(request)
        self.seen["trimmed"] += len(self.model.free) > had

    @precondition(lambda self: self.model.live)
    @rule(data=st.data(), publish=st.booleans())
    def prefill_chunk(self, data, publish):
        """Extend towards the prompt's end, compute, and usually publish."""
        request = self._request(data)
        high = max(request.committed, len(request.tokens))
        new_len = self._length(data, request.committed, high)
        if self._extend(request, new_len):
            self._compute(request, new_len)
            if publish and not request.inbound:
                self._checkpoint(request, new_len)

    @precondition(lambda self: self.model.live)
    @rule(data=st.data())
    def checkpoint(self, data):
        request = self._request(data)
        up_to = self._length(data, 0, request.committed)
        if request.inbound:
            before = self._frozen()
            with pytest.raises(AssertionError, match="inbound"):
                self.cache.checkpoint(request.kv, request.tokens[:up_to])
            assert self._frozen() == before
            return
        self._checkpoint(request, up_to)

    @precondition(lambda self: any(r.inbound for r in self.model.live))
    @rule(data=st.data())
    def adopt(self, data):
        request = data.draw(st.sampled_from([r for r in self.model.live if r.inbound]))
        self.cache.adopt(request.kv)
        request.inbound = False

    @precondition(lambda self: any(not r.inbound for r in self.model.live))
    @rule(data=st.data())
    def pin(self, data):
        request = data.draw(st.sampled_from([r for r in self.model.live if not r.inbound]))
        self._pin(request)
        self.seen["pinned"] += request.committed > 0

    @precondition(lambda self: any(r.pins for r in self.model.live))
    @rule(data=st.data())
    def unpin(self, data):
        request = data.draw(st.sampled_from([r for r in self.model.live if r.pins]))
        self._unpin(request)

    def _unpin(self, request: ModelRequest) -> None:
        self.cache.unpin(request.kv)
        request.pins -= 1

    @precondition(lambda self: len(self.model.live) < ROWS)
    @precondition(lambda self: any(not r.inbound for r in self.model.live))
    @rule(data=st.data(), goes_on=st.booleans())
    def fork(self, data, goes_on):
        """A sample of a prompt: usually right after its checkpoint, and on with another token."""
        live = [r for r in self.model.live if not r.inbound]
        parent = data.draw(st.sampled_from(live), label="parent")
        if data.draw(st.sampled_from((True, True, False)), label="published"):
            self._checkpoint(parent, parent.committed)
        twin = self._fork(parent)
        if twin is not None and goes_on:
            twin.tokens = np.append(twin.tokens[: twin.committed], np.int32(5 + self.opened % 3))
            if self._extend(twin, twin.committed + 1):
                self._compute(twin, twin.committed + 1)

    @precondition(lambda self: len(self.model.live) == ROWS)
    @precondition(lambda self: any(not r.inbound for r in self.model.live))
    @rule(data=st.data())
    def fork_without_a_row(self, data):
        live = [r for r in self.model.live if not r.inbound]
        parent, before = data.draw(st.sampled_from(live), label="parent"), self._frozen()
        with pytest.raises(OutOfRows, match="rows: 0 free"):
            self.cache.fork(parent.kv, "one too many")
        assert self._frozen() == before

    @precondition(lambda self: self.model.live)
    @rule(data=st.data(), publish=st.booleans())
    def release(self, data, publish):
        request = self._request(data)
        if request.pins:
            before = self._frozen()
            with pytest.raises(AssertionError, match="still read by a handoff"):
                self.cache.release(request.kv, request.tokens)
            assert self._frozen() == before
        else:
            self._release(request, publish)

    @precondition(lambda self: not self.model.live)
    @rule()
    def drop_cache(self):
        self.cache.drop_cache()
        self.model.dropped()

    @rule()
    def look(self):
        """Always possible: an audit and the routers' view change nothing."""
        before = self._frozen()
        self.cache.audit()
        assert set(self.cache.snapshot_blocks()) == self.model.block_hashes()
        assert self._frozen() == before

    # --- after every step -------------------------------------------------------------------

    @invariant()
    def ledger_holds(self):
        self.seen["step"] += 1
        self.seen["split"] += any(len(n.children) > 1 for n in self.cache.tree.nodes())
        self.cache.audit()

    @invariant()
    def owners_are_the_models(self):
        model, cache = self.model, self.cache
        assert set(cache.allocator.free_slots().tolist()) == model.free
        assert tree_pages(cache) == model.published
        for request in model.live:
            kv = request.kv
            assert cache.slots(kv, 0, kv.allocated_len).tolist() == request.slots
            lengths = (kv.committed_len, kv.cache_protected_len, kv.pins, kv.inbound)
            assert lengths == (request.committed, request.protected, request.pins, request.inbound)
        self._accounts_are_the_models()

    def _accounts_are_the_models(self) -> None:
        model, accounts = self.model, self.cache.accounts()
        own = {True: 0, False: 0}
        pinned: set[int] = set()
        for request in model.live:
            own[request.inbound] += len(request.slots) - request.protected
            pinned |= set(request.slots) if request.pins else set()
        assert (accounts.private, accounts.inbound) == (own[False], own[True])
        assert accounts.protected == len(model.locked()) * model.page_size
        assert accounts.evictable == model.evictable_slots()
        assert accounts.outbound_pinned == len(pinned)
        assert self.cache.free_or_evictable() == len(model.free) + model.evictable_slots()

    @invariant()
    def rows_read_their_tokens(self):
        free = np.asarray(sorted(self.model.free), dtype=np.int64)
        write_stamps(self.cache, free, np.full((len(free), 2), -1.0, dtype=np.float32))
        for request in self.model.live:
            slots = self.cache.slots(request.kv, 0, request.committed)
            expected = request.stamps()[: request.committed]
            for layer in read_stamps(self.cache, slots):
                np.testing.assert_array_equal(layer[0], expected)
                np.testing.assert_array_equal(layer[1], -expected)

    @invariant()
    def handoffs_read_what_they_took_note_of(self):
        """Slots noted when a row was pinned, read whatever has been published since."""
        for request in self.model.live:
            if request.pins:
                slots = np.asarray(request.noted, dtype=np.int64)
                expected = request.stamps()[: len(slots)]
                for layer in read_stamps(self.cache, slots):
                    np.testing.assert_array_equal(layer[0], expected)

    @invariant()
    def events_add_up(self):
        apply_events(self.routers_view, self.cache.take_events())
        assert self.routers_view == self.model.block_hashes()

    def teardown(self) -> None:
        for request in list(self.model.live):
            for _ in range(request.pins):
                self.cache.unpin(request.kv)
            self.cache.release(request.kv, None)
        self.cache.audit()
        assert self.cache.accounts().is_idle


def _run(page_size: int, radix: bool, examples: int, seed: int | None) -> Counter[str]:
    """Run the machine; returns what happened how often."""
    seen: Counter[str] = Counter()

    def machine() -> KvCacheMachine:
        return KvCacheMachine(page_size, radix, seen)

    run_machine(machine, examples=examples, steps=STEPS, seed=seed)
    return seen


@pytest.mark.parametrize("radix", [True, False], ids=["radix", "chunk"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_agrees_with_the_model(page_size, radix):
    wanted = WORTH_SEEING if radix else WORTH_SEEING_WITHOUT_TREE
    seen: Counter[str] = Counter()
    for seed in CI_SEEDS:
        seen += _run(page_size, radix, CI_EXAMPLES, seed)
        if wanted <= set(seen):
            break
    assert set(seen) >= wanted
    assert seen["step"] * 2 * len(PAGE_SIZES) >= 500


@pytest.mark.slow
def test_agrees_with_the_model_for_20000_steps():
    seen: Counter[str] = Counter()
    for page_size in PAGE_SIZES:
        for radix in (True, False):
            seen += _run(page_size, radix, SLOW_EXAMPLES, seed=None)
    assert seen["step"] >= 20_000
    assert set(seen) >= WORTH_SEEING
