"""The naive model of a prefix index under a sliding window: pages that have slots, by prefix.

No edges, no tombstones: a page is in the dictionary or not, and what a window needs is found by
looking at each position. Which pages an eviction takes is read from the real tree, by a scan of
all its nodes before it happens.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from kvferry.kv_events import (
    event_block_tokens,
    prompt_block_hashes,
)
from mem_cache.eviction import RANKS
from tests.support.kv_caches import stamps

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from kvferry.config import EvictionPolicy
    from kvferry.ids import ExtraKey, TokenIds
    from mem_cache.request_kv import RequestKV
    from mem_cache.tree_node import TreeNode
    from mem_cache.window_radix_cache import WindowRadixCache

PageKey: TypeAlias = tuple["ExtraKey", bytes]
"""The tokens up to the end of a page, with the extra key."""
Pages: TypeAlias = dict[PageKey, tuple[int, ...]]


@dataclass(eq=False)
class Live:
    """One live request, as the model sees it."""

    kv: RequestKV
    tokens: TokenIds
    seed: str
    shared: bool
    inbound: bool
    slots: list[int]
    """Of all positions; 0 left of `start`."""
    start: int
    protected: int
    committed: int
    pins: int = 0
    values: NDArray[np.float32] | None = None

    def stamps(self) -> NDArray[np.float32]:
        """K/V of all its tokens."""
        if self.values is None or len(self.values) != len(self.tokens):
            self.values = stamps(self.tokens, self.seed)
        return self.values


def is_read(position: int, length: int, window: int) -> bool:
    """Whether some token after the first `length` reads the K/V of `position`."""
    return any(position > query - window for query in range(length, length + window))


@cache
def needed_from(length: int, window: int, page_size: int) -> int:
    """Start of the first page with a position that is still read."""
    for position in range(length):
        if is_read(position, length, window):
            return position // page_size * page_size
    return length // page_size * page_size


@cache
def last_block(extra_key: ExtraKey, data: bytes, block: int) -> int:
    """Hash of the block that ends where these tokens end."""
    return prompt_block_hashes(np.frombuffer(data, dtype=np.int32), block, extra_key)[-1]


@dataclass
class WindowModel:
    """What the index should hold."""

    page_size: int
    window: int
    pages: Pages = field(default_factory=dict)

    def keys(self, extra_key: ExtraKey, tokens: TokenIds, length: int) -> list[PageKey]:
        """Keys of the whole pages within the first `length` tokens."""
        data = tokens[:length].tobytes()
        step = 4 * self.page_size
        return [(extra_key, data[:end]) for end in range(step, len(data) + 1, step)]

    def needed_from(self, length: int) -> int:
        """Start of the first page that anything after `length` tokens reads."""
        return needed_from(length, self.window, self.page_size)

    def match_len(self, extra_key: ExtraKey, tokens: TokenIds) -> int:
        """The longest length all of whose still needed pages have slots."""
        keys = self.keys(extra_key, tokens, len(tokens))
        for count in range(len(keys), 0, -1):
            first = self.needed_from(count * self.page_size) // self.page_size
            if all(key in self.pages for key in keys[first:count]):
                return count * self.page_size
        return 0

    def insert(
        self, extra_key: ExtraKey, tokens: TokenIds, slots: list[int], owned_from: int
    ) -> list[int]:
        """Offer `slots[owned_from:]`; returns the duplicates among them."""
        duplicates: list[int] = []
        for index, key in enumerate(self.keys(extra_key, tokens, len(tokens))):
            begin = index * self.page_size
            if begin < owned_from:
                continue
            own = tuple(slots[begin : begin + self.page_size])
            if self.pages.setdefault(key, own) != own:
                duplicates += own
        return duplicates

    def block_hashes(self) -> set[int]:
        """Hashes of the event blocks whose last page has slots."""
        block = event_block_tokens(self.page_size)
        return {
            last_block(extra, data, block)
            for extra, data in self.pages
            if len(data) % (4 * block) == 0
        }


def tree_pages(tree: WindowRadixCache) -> Pages:
    """What the real tree has slots for, page by page."""
    step = 4 * tree.page_size
    pages: Pages = {}
    for path, node in _paths(tree):
        if not node.on_device:
            continue
        start = len(path) - len(node.key)
        for end in range(start + step, len(path) + 1, step):
            first = (end - start) // 4 - tree.page_size
            slots = node.value[first : first + tree.page_size]
            pages[node.extra_key, path[:end]] = tuple(slots.tolist())
    return pages


def expected_eviction(
    tree: WindowRadixCache, policy: EvictionPolicy, num_tokens: int
) -> list[TreeNode]:
    """The nodes that eviction must take: every candidate is one already, so a scan will do."""
    candidates = [node for node in tree.nodes() if node.on_device and node.lock_ref == 0]
    candidates.sort(key=lambda node: (RANKS[policy](node), -node.end, node.node_id))
    taken: list[TreeNode] = []
    for node in candidates:
        if sum(other.length for other in taken) >= num_tokens:
            break
        taken.append(node)
    return taken


def assert_shape(tree: WindowRadixCache, handles: Iterable[tuple[TreeNode, int]]) -> None:
    """Every leaf has slots, no tombstone is locked, and the locks are those of `handles`."""
    expected: Counter[int] = Counter()
    for end, start in handles:
        node = end
        while node.parent is not None and node.end > start:
            assert node.start >= start, f"{node} straddles the start of a lock, {start}"
            expected[node.node_id] += 1
            node = node.parent
    protected = evictable = 0
    for node in tree.nodes():
        assert node.on_device or node.children, f"{node} is a childless tombstone"
        assert node.on_device or node.lock_ref == 0, f"{node} is a locked tombstone"
        assert len(node.value) in (0, node.length)
        assert node.lock_ref == expected[node.node_id], f"{node}: {expected[node.node_id]} locks"
        assert node.parent is not None
        assert node.parent.children[node.child_key] is node
        assert node.parent.end == node.start
        assert tree.can_find(node) or not tree.is_evictable(node)
        protected += len(node.value) if node.lock_ref else 0
        evictable += 0 if node.lock_ref else len(node.value)
    assert (tree.protected_size(), tree.evictable_size()) == (protected, evictable)


def _paths(tree: WindowRadixCache) -> Iterator[tuple[bytes, TreeNode]]:
    paths: dict[int, bytes] = {tree.root.node_id: b""}
    for node in tree.nodes():
        assert node.parent is not None, "every node but the root has a parent"
        paths[node.node_id] = paths[node.parent.node_id] + node.key
        yield paths[node.node_id], node
