"""All tiers against a naive model, with copies that are late, out of order, or fail.

After every step: all ledger checks of the tiers in memory hold, what is unlocked can be evicted,
every page of either and every live row holds exactly the K/V of its tokens, and the KV events add
up to what is held in memory. With files the process may lose its memory, or a file a bit. Slots
that are free on either tier are overwritten, as the next owner would, so that nobody can read
them, or copy to or from them, unnoticed.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from kvferry.ids import ExtraKey
from kvferry.kv_events import (
    event_block_tokens,
    prompt_block_hashes,
)
from mem_cache.errors import OutOfSlots
from mem_cache.page_file import page_digests
from tests.support.kv_caches import read_stamps, stamps, tiered_cache, write_stamps
from tests.support.kv_model import apply_events, tree_pages
from tests.support.manual_copier import ManualCopier

if TYPE_CHECKING:
    from mem_cache.request_kv import RequestKV

ROWS = 8
DEVICE_PAGES, HOST_PAGES = 10, 14


@dataclass(eq=False)
class Live:
    """One live request."""

    kv: RequestKV
    tokens: np.ndarray


class TiersMachine(RuleBasedStateMachine):
    """One worker's KV in two tiers under requests, and a copier that does as it likes."""

    def __init__(self, page_size, eviction, write_policy, seen, *, with_files) -> None:
        super().__init__()
        self.size = page_size
        self.policies = {"eviction": eviction, "write_policy": write_policy}
        self.folder = tempfile.TemporaryDirectory() if with_files else None
        self._start()
        self.live: list[Live] = []
        self.opened = 0
        self.seen = seen
        self.stamped: dict[tuple[str, bytes], np.ndarray] = {}

    def _start(self):
        self.copier, self.disk = ManualCopier(), ManualCopier()
        self.cache = tiered_cache(
            self.size,
            self.copier,
            pages=DEVICE_PAGES,
            host_pages=HOST_PAGES,
            auditing=False,
            files=(Path(self.folder.name), self.disk) if self.folder else None,
            **self.policies,
        )
        self.routers_view: set[int] = set()

    # --- what there is ----------------------------------------------------------------------

    def _prompt(self, data):
        """One of two texts up to a fork, then one of three others: most prompts share pages."""
        pages = data.draw(st.sampled_from(range(1, DEVICE_PAGES - 2)), label="pages")
        offset = data.draw(st.sampled_from((0, 1, self.size - 1)), label="offset")
        text = data.draw(st.sampled_from((0, 0, 1)), label="text")
        fork = data.draw(st.sampled_from(range(DEVICE_PAGES // 2)), label="fork")
        tail = data.draw(st.sampled_from((2, 3, 4)), label="tail")
        kinds = np.where(np.arange(pages + 1) < fork, text, tail).astype(np.int32)
        return np.repeat(kinds, self.size)[: pages * self.size + offset]

    def _keys(self, extra, tokens):
        data, step = tokens.tobytes(), 4 * self.size
        return [(extra, data[:end]) for end in range(step, len(data) + 1, step)]

    def _host_pages(self):
        """Host slot where each page begins, by key."""
        keys, pages = {self.cache.tree.root.node_id: b""}, {}
        for node in self.cache.tree.nodes():
            before = keys[node.parent.node_id]
            keys[node.node_id] = before + node.key
            for index, slot in enumerate(node.host_value[:: self.size].tolist()):
                end = len(before) + 4 * self.size * (index + 1)
                pages[node.extra_key, keys[node.node_id][:end]] = slot
        return pages

    def _held(self, extra, tokens, *pages):
        """Leading tokens, of all but the last, whose pages are in one of these."""
        count = 0
        for key in self._keys(extra, tokens[:-1]):
            if not any(key in some for some in pages):
                break
            count += self.size
        return count

    def _held_with_files(self, extra, tokens, held):
        """Leading tokens when what is in files goes on where memory ends."""
        files = self.cache.tier.files
        if files is None:
            return held
        page_hash = self.cache.layout.page_hash
        for digest in page_digests(page_hash, extra, tokens[:-1], self.size)[held // self.size :]:
            if not files.files.has(digest):
                break
            held += self.size
        return held

    def _locked(self):
        return {
            key
            for one in self.live
            for key in self._keys(one.kv.extra_key, one.tokens[: one.kv.cache_protected_len])
        }

    def _evictable(self):
        return self.size * len(tree_pages(self.cache).keys() - self._locked())

    def _stamps(self, extra, tokens):
        """[n, 2] of the last page that ends with these tokens; remembered, as it is slow."""
        key = (extra, tokens.tobytes())
        if key not in self.stamped:
            self.stamped[key] = stamps(tokens, extra)
        return self.stamped[key]

    # --- what rules are made of -------------------------------------------------------------

    def _open(self, prompt, extra, load) -> Live:
        device, host = tree_pages(self.cache), self._host_pages()
        kv = self.cache.open(f"r{self.opened}", prompt, ExtraKey(extra))
        self.opened += 1
        one = Live(kv, prompt)
        self.live.append(one)
        assert kv.prefix_len == self._held(extra, prompt, device)
        self.seen["device hit"] += kv.prefix_len > 0
        if load:
            self._load(one, self._held(extra, prompt, device, host))
        return one

    def _load(self, one, held):
        kv, copies = one.kv, self.cache.copies_in_flight
        device = tree_pages(self.cache)
        room = self.cache.allocator.num_free + self._evictable()
        most = self._held_with_files(kv.extra_key, one.tokens, held)
        coming = self.cache.load_back(kv, one.tokens)
        assert coming == kv.loading_len
        assert kv.prefix_len + coming <= most
        if kv.prefix_len + coming > held:
            self.seen["fetched"] += 1
            return
        if coming == 0:
            assert room == 0 or kv.prefix_len == held
        elif self.cache.copies_in_flight <= copies:
            self.seen["load joined"] += 1
        else:
            assert coming == min(held - kv.prefix_len, room)
            self.seen["load cut short"] += kv.prefix_len + coming < held
        self._evicted(device, coming > 0)

    def _evicted(self, before, was_needed):
        """What left the device was not in use, and left for a reason."""
        gone = before.keys() - tree_pages(self.cache).keys()
        assert not gone & self._locked(), "cache in use was evicted"
        assert was_needed or not gone, "cache was evicted although nobody needed its slots"
        self.seen["evicted to the host"] += bool(gone & self._host_pages().keys())

    def _extend(self, one, new_len) -> bool:
        """Whether there were slots. With two tiers as with one, what is unlocked can be had."""
        if new_len > len(one.tokens):
            tail = np.resize(one.tokens[-3:] ^ 1, new_len - len(one.tokens))
            one.tokens = np.concatenate([one.tokens, tail]).astype(np.int32)
        needed = self.cache.layout.round_up(new_len) - one.kv.allocated_len
        free, device = self.cache.allocator.num_free, tree_pages(self.cache)
        if needed > free + self._evictable():
            with pytest.raises(OutOfSlots, match="KV slots needed"):
                self.cache.extend(one.kv, new_len)
            assert tree_pages(self.cache) == device
            self.seen["out of slots"] += 1
            return False
        copies = self.cache.copies_in_flight
        self.cache.extend(one.kv, new_len)
        self.seen["write finished by eviction"] += self.cache.copies_in_flight < copies
        self._evicted(device, needed > free)
        return True

    def _compute(self, one, new_len, publish):
        kv = one.kv
        if not self._extend(one, new_len):
            return
        values = stamps(one.tokens[:new_len], kv.extra_key)[kv.committed_len :]
        write_stamps(self.cache, self.cache.slots(kv, kv.committed_len, new_len), values)
        self.cache.commit(kv, new_len)
        if publish:
            waited_for = {
                node.node_id for node in self.cache.tree.nodes() if not node.on_device
            } & self._in_flight()
            self.cache.checkpoint(kv, one.tokens[:new_len])
            filled = {n.node_id for n in self.cache.tree.nodes() if n.on_device}
            self.seen["filled while loading"] += bool(waited_for & filled)

    def _in_flight(self):
        return {n.node_id for n in self.cache.tree.nodes() if n.in_flight is not None}

    def _release(self, one, publish):
        self.seen["released while loading"] += one.kv.loading_len > 0
        self.live.remove(one)
        self.cache.release(one.kv, one.tokens if publish else None)

    def _run_copies(self):
        self.disk.run_all()
        self.copier.run_all()
        self._poll()

    def _poll(self):
        waiting = {id(one.kv): one.kv.prefix_len for one in self.live if one.kv.loading_len > 0}
        for kv in self.cache.poll():
            assert kv.loading_len == 0
            gained = kv.prefix_len - waiting.pop(id(kv))
            assert gained >= 0
            self.seen["loaded"] += gained > 0
        for one in self.live:
            assert (one.kv.loading_len > 0) == (id(one.kv) in waiting), "a load got lost"

    # --- rules ------------------------------------------------------------------------------

    @precondition(lambda self: len(self.live) < ROWS - 2)
    @rule(data=st.data(), extra=st.sampled_from(("", "", "", "adapter")), load=st.booleans())
    def open(self, data, extra, load):
        self._open(self._prompt(data), extra, load)

    @precondition(lambda self: len(self.live) < ROWS - 2)
    @rule(data=st.data(), extra=st.sampled_from(("", "", "", "adapter")), settles=st.booleans())
    def serve(self, data, extra, settles):
        """A whole request between two steps of the others."""
        prompt = self._prompt(data)
        one = self._open(prompt, extra, load=True)
        while one.kv.loading_len > 0:
            self._run_copies()
        self._compute(one, len(prompt), publish=True)
        self._release(one, publish=True)
        if settles:
            self._run_copies()

    @precondition(lambda self: len(self.live) < ROWS - 2)
    @rule()
    def push_out(self):
        """Somebody takes all slots that can be had, for a moment."""
        one = self._open(np.zeros(1, dtype=np.int32), f"filler {self.opened}", load=False)
        self._extend(one, self.cache.free_or_evictable())
        self._release(one, publish=False)

    @precondition(lambda self: len(self.live) < ROWS - 2 and self._only_on_host())
    @rule(
        data=st.data(),
        count=st.sampled_from((1, 1, 2)),
        forks=st.booleans(),
        is_crowded=st.sampled_from((False, False, True)),
    )
    def want_what_is_on_the_host(self, data, count, forks, is_crowded):
        """One or two requests for the same text or, at some page, different ones."""
        extra, key = data.draw(st.sampled_from(self._only_on_host()), label="page")
        crowd = self._open(np.zeros(1, dtype=np.int32), f"crowd {self.opened}", load=False)
        if is_crowded:
            self._extend(crowd, max(1, self.cache.free_or_evictable() - self.size))
        for _ in range(count):
            tokens = np.frombuffer(key + b"\x09\0\0\0", dtype=np.int32)
            self._open(tokens, extra, load=True)
            if forks:
                key = key[: data.draw(st.sampled_from(range(4, len(key) + 1, 4)), label="fork")]
        self._release(crowd, publish=False)

    def _only_on_host(self):
        return sorted(self._host_pages().keys() - tree_pages(self.cache).keys())

    @precondition(
        lambda self: len(self.live) < ROWS - 2 and any(o.kv.loading_len for o in self.live)
    )
    @rule(data=st.data())
    def compute_what_is_loading(self, data):
        """Somebody who did not wait publishes tokens that are on their way."""
        loading = [one for one in self.live if one.kv.loading_len > 0]
        wanted = data.draw(st.sampled_from(loading), label="loading")
        tokens = wanted.tokens
        up_to = data.draw(st.sampled_from(range(1, len(tokens) + 1)), label="up to")
        one = self._open(tokens, wanted.kv.extra_key, load=False)
        self._compute(one, max(up_to, one.kv.committed_len), publish=True)
        self._release(one, publish=False)

    @precondition(lambda self: any(one.kv.loading_len == 0 for one in self.live))
    @rule(data=st.data(), publish=st.booleans(), finish_fails=st.sampled_from((0, 0, 0, 1)))
    def compute(self, data, publish, finish_fails):
        ready = [one for one in self.live if one.kv.loading_len == 0]
        one = data.draw(st.sampled_from(ready), label="request")
        more = data.draw(st.sampled_from((1, self.size, 2 * self.size, 5 * self.size)))
        new_len = min(one.kv.committed_len + more, self.cache.num_slots)
        self.copier.finish_fails = RuntimeError("finish") if finish_fails else None
        self._compute(one, new_len, publish)
        self.copier.finish_fails = None

    @precondition(lambda self: self.live)
    @rule(data=st.data(), publish=st.booleans())
    def release(self, data, publish):
        self._release(data.draw(st.sampled_from(self.live), label="request"), publish)

    @precondition(lambda self: self._pending(is_load=True))
    @rule(data=st.data(), fails=st.sampled_from((False, False, True)), polls=st.booleans())
    def load_ends(self, data, fails, polls):
        self._copy_ends(data, is_load=True, fails=fails, polls=polls)

    @precondition(lambda self: self._pending(is_load=False))
    @rule(data=st.data(), fails=st.sampled_from((False, False, True)), polls=st.booleans())
    def write_ends(self, data, fails, polls):
        self._copy_ends(data, is_load=False, fails=fails, polls=polls)

    def _pending(self, *, is_load):
        return [i for i, copy in enumerate(self.copier.pending) if copy.is_urgent == is_load]

    def _copy_ends(self, data, *, is_load, fails, polls):
        """Any copy, not only the first one."""
        index = data.draw(st.sampled_from(self._pending(is_load=is_load)), label="copy")
        self.seen["load failed" if is_load else "write failed"] += fails
        self.copier.run(index, OSError("broken") if fails else None)
        if polls:
            self._poll()

    @precondition(lambda self: self.disk.pending)
    @rule(data=st.data(), polls=st.booleans())
    def file_copy_ends(self, data, polls):
        """Any copy, not only the first one."""
        self.disk.run(data.draw(st.sampled_from(range(len(self.disk.pending))), label="copy"))
        if polls:
            self._poll()

    @precondition(lambda self: self._files())
    @rule(data=st.data())
    def a_file_loses_a_bit(self, data):
        file = data.draw(st.sampled_from(self._files()), label="file")
        content = bytearray(file.read_bytes())
        content[data.draw(st.sampled_from(range(len(content))), label="byte")] ^= 1
        file.write_bytes(content)

    def _files(self):
        return sorted(Path(self.folder.name).glob("??/*")) if self.folder else []

    @precondition(lambda self: self._files() and len(self.live) < 2)
    @rule()
    def restart(self):
        """Memory is lost, and with it requests and copies; files are not."""
        self.live.clear()
        self.seen["corrupt"] += self.cache.tier.files.files.statistics().corrupt
        self.cache.close()
        self._start()
        self.seen["restarted"] += 1

    @rule()
    def poll(self):
        """Always possible."""
        self._poll()

    @precondition(lambda self: not self.live and not self.cache.copies_in_flight)
    @rule()
    def drop_cache(self):
        self.cache.drop_cache()

    # --- after every step -------------------------------------------------------------------

    @invariant()
    def ledger_holds(self):
        self.seen["step"] += 1
        marked = Counter(n.in_flight for n in self.cache.tree.nodes() if n.in_flight is not None)
        self.seen["split in flight"] += max(marked.values(), default=0) > 1
        tier = self.cache.tier
        self.seen["gone from the host"] += tier.statistics.written > HOST_PAGES * self.size
        self.cache.audit()
        accounts = self.cache.accounts()
        assert accounts.evictable == self._evictable(), "a copy keeps slots from those in need"
        if not self.live:
            assert accounts.is_idle

    @invariant()
    def every_page_holds_its_tokens(self):
        self._overwrite_free_slots()
        device, host = tree_pages(self.cache), self._host_pages()
        for (extra, data), slots in device.items():
            expected = self._stamps(extra, np.frombuffer(data, dtype=np.int32))[-self.size :]
            self._same(read_stamps(self.cache, np.asarray(slots)), expected)
        for (extra, data), slot in host.items():
            expected = self._stamps(extra, np.frombuffer(data, dtype=np.int32))[-self.size :]
            page = self.cache.tier.pages.page(slot).numpy().view(np.float32)
            self._same(page.reshape(2, 2, self.size, 2), expected)
        for one in self.live:
            kv = one.kv
            slots = self.cache.slots(kv, 0, kv.committed_len)
            expected = self._stamps(kv.extra_key, one.tokens[: kv.committed_len])
            self._same(read_stamps(self.cache, slots), expected)

    def _same(self, held, expected):
        assert (held[:, 0] == expected).all(), "K of other tokens"
        assert (held[:, 1] == -expected).all(), "V of other tokens"

    def _overwrite_free_slots(self):
        free = self.cache.allocator.free_slots()
        write_stamps(self.cache, free, np.full((len(free), 2), -1.0, dtype=np.float32))
        for slot in self.cache.tree.host_slots.free_slots()[:: self.size].tolist():
            self.cache.tier.pages.page(slot).fill_(255)

    @invariant()
    def events_add_up(self):
        apply_events(self.routers_view, self.cache.take_events())
        block = event_block_tokens(self.size)
        assert self.routers_view == {
            prompt_block_hashes(np.frombuffer(data, dtype=np.int32), block, extra)[-1]
            for extra, data in tree_pages(self.cache).keys() | self._host_pages().keys()
            if len(data) % (4 * block) == 0
        }

    def teardown(self) -> None:
        for one in list(self.live):
            self._release(one, publish=False)
        while self.cache.copies_in_flight:
            self._run_copies()
        self.cache.audit()
        assert self.cache.accounts().is_idle
        assert self.cache.host_accounts().is_idle
        self.cache.close()
        if self.folder is not None:
            self.folder.cleanup()
