"""A naive model of one worker's KV: which slot belongs to whom, page by page, in dictionaries.

It knows nothing of trees, edges or locks. A page of cache is known by the extra key and all
tokens up to its end. What it cannot know, which cache an eviction chose, it takes from the
real tree after checking that the choice was legal, sufficient, not excessive and least recent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from kvferry.kv_events import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    event_block_tokens,
    prompt_block_hashes,
)
from tests.support.kv_caches import stamps

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from kvferry.ids import ExtraKey, TokenIds
    from kvferry.kv_events import KvEvent
    from mem_cache.kv_cache import KVCache
    from mem_cache.request_kv import RequestKV
    from mem_cache.tree_node import TreeNode

PageKey: TypeAlias = tuple["ExtraKey", bytes]
Published: TypeAlias = dict[PageKey, tuple[int, ...]]


@dataclass(eq=False)
class ModelRequest:
    """One live request, as the model sees it."""

    kv: RequestKV
    extra_key: ExtraKey
    stamp_seed: str
    shareable: bool
    inbound: bool
    tokens: TokenIds
    slots: list[int]
    committed: int
    protected: int
    pins: int = 0
    noted: list[int] = field(default_factory=list)
    """Slots of what was computed when it was pinned."""

    def stamps(self) -> NDArray[np.float32]:
        """K/V of all its tokens."""
        return stamps(self.tokens, self.stamp_seed)


@dataclass
class KvModel:
    """Owners of all slots: `free`, `published` pages, and each request's own."""

    page_size: int
    num_slots: int
    rows: int
    radix: bool
    free: set[int] = field(default_factory=set)
    published: Published = field(default_factory=dict)
    accessed: dict[PageKey, int] = field(default_factory=dict)
    live: list[ModelRequest] = field(default_factory=list)
    tick: int = 0

    def __post_init__(self) -> None:
        self.free = set(range(self.page_size, self.page_size + self.num_slots))

    # --- keys -------------------------------------------------------------------------------

    def pages_of(self, extra_key: ExtraKey, tokens: TokenIds, length: int) -> list[PageKey]:
        """Keys of the whole pages within the first `length` tokens."""
        data = tokens[:length].tobytes()
        step = 4 * self.page_size
        return [(extra_key, data[:end]) for end in range(step, len(data) + 1, step)]

    def locked(self) -> set[PageKey]:
        """Pages that a live request reads."""
        return {
            page
            for request in self.live
            for page in self.pages_of(request.extra_key, request.tokens, request.protected)
        }

    def evictable_slots(self) -> int:
        """Slots of pages nobody reads."""
        return self.page_size * len(self.published.keys() - self.locked())

    # --- what requests do -------------------------------------------------------------------

    def hit_pages(
        self, extra_key: ExtraKey, tokens: TokenIds, *, inbound: bool = False
    ) -> list[PageKey]:
        """Leading pages that are published; of all but the last token, unless it is inbound."""
        hits: list[PageKey] = []
        for page in self.pages_of(extra_key, tokens, len(tokens) - (not inbound)):
            if page not in self.published:
                break
            hits.append(page)
        return hits

    def opened(self, request: ModelRequest) -> None:
        """A request got its row and locked its prefix."""
        hits: list[PageKey] = []
        if request.shareable:
            hits = self.hit_pages(request.extra_key, request.tokens, inbound=request.inbound)
        self._touch(hits)
        request.slots = [slot for page in hits for slot in self.published[page]]
        request.committed = request.protected = len(request.slots)
        self.live.append(request)

    def slots_needed(self, request: ModelRequest, new_len: int) -> int:
        """Fresh slots an extension takes: whole pages beyond what the request has."""
        pages = -(-new_len // self.page_size)
        return max(0, pages * self.page_size - len(request.slots))

    def extended(self, request: ModelRequest, row: list[int]) -> None:
        """The request's row became longer."""
        fresh = row[len(request.slots) :]
        assert row[: len(request.slots)] == request.slots, "an extension changed older slots"
        assert len(set(fresh)) == len(fresh), "a slot was given twice"
        assert set(fresh) <= self.free, "slots were given that somebody owns"
        self.free -= set(fresh)
        request.slots = row

    def trimmed(self, request: ModelRequest) -> None:
        """What the request has beyond the page of its last computed token came free, unless a
        handoff reads it."""
        kept = -(-request.committed // self.page_size) * self.page_size
        if not request.pins:
            self.free |= set(request.slots[kept:])
            request.slots = request.slots[:kept]

    def is_put_off(self, request: ModelRequest, up_to: int) -> bool:
        """Whether publishing would give up slots of a pinned request."""
        key_len = up_to // self.page_size * self.page_size
        pages = self.pages_of(request.extra_key, request.tokens, key_len)
        own = pages[request.protected // self.page_size :]
        publishes = self.radix and request.shareable
        return publishes and request.pins > 0 and any(page in self.published for page in own)

    def checkpointed(self, request: ModelRequest, up_to: int) -> None:
        """The first `up_to` tokens were published; duplicates were freed, the row rewritten."""
        key_len = up_to // self.page_size * self.page_size
        if not (self.radix and request.shareable) or key_len <= request.protected:
            return
        pages = self.pages_of(request.extra_key, request.tokens, key_len)
        if self.is_put_off(request, up_to):
            self._touch([page for page in pages if page in self.published])
            return
        self._touch(pages)
        for index, page in enumerate(pages):
            begin = index * self.page_size
            own = tuple(request.slots[begin : begin + self.page_size])
            held = self.published.setdefault(page, own)
            if begin >= request.protected and held != own:
                self.free |= set(own)
            request.slots[begin : begin + self.page_size] = held
        request.protected = key_len

    def forked(self, parent: ModelRequest, twin: ModelRequest, row: list[int]) -> None:
        """Another request got the parent's published pages, and slots of its own for the rest."""
        fresh = row[parent.protected :]
        assert row[: parent.protected] == parent.slots[: parent.protected]
        assert len(fresh) == self.fork_slots(parent)
        assert len(set(fresh)) == len(fresh), "a slot was given twice"
        assert set(fresh) <= self.free, "slots were given that somebody owns"
        self.free -= set(fresh)
        twin.slots = row
        twin.committed, twin.protected = parent.committed, parent.protected
        self.live.append(twin)

    def fork_slots(self, parent: ModelRequest) -> int:
        """Fresh slots a fork takes: whole pages for all that is computed and not published."""
        pages = -(-parent.committed // self.page_size)
        return pages * self.page_size - parent.protected

    def released(self, request: ModelRequest, publish: bool) -> None:
        """The request ended."""
        if publish and not request.inbound:
            self.checkpointed(request, request.committed)
        self.free |= set(request.slots[request.protected :])
        self.live.remove(request)

    def dropped(self) -> None:
        """All cache was given back."""
        self.free |= {slot for slots in self.published.values() for slot in slots}
        self.published.clear()

    def _touch(self, pages: list[PageKey]) -> None:
        self.tick += 1
        for page in pages:
            self.accessed[page] = self.tick

    # --- eviction ---------------------------------------------------------------------------

    def evicted(self, remaining: Published, shortage: int) -> None:
        """Accept the pages an eviction for `shortage` slots removed, if the choice was right."""
        gone = self.published.keys() - remaining.keys()
        if shortage <= 0:
            assert not gone, "cache was evicted although enough slots were free"
            return
        assert len(gone) * self.page_size >= shortage, "too little was evicted"
        assert not gone & self.locked(), "cache in use was evicted"
        latest = max(self.accessed[page] for page in gone)
        before = sum(self.accessed[page] < latest for page in gone)
        assert before * self.page_size < shortage, "more was evicted than needed"
        parents = {(extra, data[: -4 * self.page_size]) for extra, data in remaining}
        leaves = remaining.keys() - parents - self.locked()
        assert all(self.accessed[leaf] >= latest for leaf in leaves), "older cache was kept"
        for page in gone:
            self.free |= set(self.published.pop(page))

    # --- what must be visible ---------------------------------------------------------------

    def block_hashes(self) -> set[int]:
        """Hashes of the event blocks that all published pages make up."""
        block = event_block_tokens(self.page_size)
        return {
            prompt_block_hashes(np.frombuffer(data, dtype=np.int32), block, extra)[-1]
            for extra, data in self.published
            if len(data) % (4 * block) == 0
        }


def tree_pages(cache: KVCache) -> Published:
    """What the real tree holds on the device, page by page."""
    step = 4 * cache.page_size
    pages: Published = {}
    for key, node in _paths(cache):
        if not node.on_device:
            continue
        start = len(key) - len(node.key)
        for end in range(start + step, len(key) + 1, step):
            first = (end - start) // 4 - cache.page_size
            slots = node.value[first : first + cache.page_size]
            pages[node.extra_key, key[:end]] = tuple(slots.tolist())
    return pages


def apply_events(view: set[int], events: Iterable[KvEvent]) -> None:
    """What a router makes of the events: a set of block hashes."""
    for event in events:
        match event:
            case BlocksStored(hashes):
                assert not view & set(hashes), "stored twice"
                view |= set(hashes)
            case BlocksRemoved(hashes):
                assert view >= set(hashes), "removed but never stored"
                view -= set(hashes)
            case AllBlocksCleared():
                view.clear()


def _paths(cache: KVCache) -> Iterator[tuple[bytes, TreeNode]]:
    keys: dict[int, bytes] = {cache.tree.root.node_id: b""}
    for node in cache.tree.nodes():
        assert node.parent is not None, "every node but the root has a parent"
        keys[node.node_id] = keys[node.parent.node_id] + node.key
        yield keys[node.node_id], node
