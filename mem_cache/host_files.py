"""What moves between host pages and files, beside the engine thread and beside other copies.

A page is written (`spill`) once the host has it, and read (`fetch`) into fresh host slots when a
prompt goes on in files where the tree ends. What was read hangs on the host's part of the tree;
the device gets it from there, like all that the host has. Files may outlive the process.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING

import numpy as np

from kvferry.clock import MonotonicClock
from mem_cache.copier import Copy
from mem_cache.page_file import page_digests
from mem_cache.tree_node import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvferry.clock import Clock
    from kvferry.ids import ExtraKey, SlotIndices
    from mem_cache.copier import Copier
    from mem_cache.file_tier import FileTier
    from mem_cache.host_pool import HostPool
    from mem_cache.request_kv import RequestKV
    from mem_cache.tiered_radix_cache import TieredRadixCache
    from mem_cache.tree_node import TreeNode
    from mem_cache.waiter import Waiter

_LOG = logging.getLogger(__name__)

SPILL_BYTES_MAX = 16 * 2**20
"""Written by one copy, at least a page: what a request may have to wait for before its own."""
FETCH_PATIENCE_S = 10.0
"""Longest that requests wait for a fetch: some GB from a healthy disk. Then they compute, and
nothing is fetched until it has ended: a disk that hangs does not make requests hang."""


@dataclass(slots=True, eq=False)
class Spill:
    """Pages on their way to files; the host's path to `node` is locked meanwhile."""

    copy: Copy
    node: TreeNode


@dataclass(slots=True, eq=False)
class Fetch:
    """Pages on their way from files to `host_slots`, to hang below `above`.

    The host's path to `above` is locked meanwhile. It goes on when nobody waits any more: it
    holds host slots only, and what it brings is cache.
    """

    copy: Copy
    above: TreeNode
    key: bytes
    """Tokens from the first one to the end of the last page wanted, as in the tree."""
    extra_key: ExtraKey
    host_slots: SlotIndices
    digests: Sequence[bytes]
    """Of the pages wanted."""
    deadline: float
    """When its waiters are let go."""
    waiters: list[Waiter] = field(default_factory=list)
    pages_read: int = 0
    """Written by the copier's thread; of use when the copy has ended."""


class HostFiles:
    """The engine thread's view of the file tier. Its copier is used for nothing else: the file
    tier does I/O in one thread, and copies in memory do not wait for disks."""

    def __init__(
        self, tree: TieredRadixCache, pages: HostPool, files: FileTier, copier: Copier
    ) -> None:
        self.files = files
        self.copier = copier
        self.clock: Clock = MonotonicClock()
        self._tree = tree
        self._pages = pages
        self._page_size = pages.page_size
        self._spills: dict[Copy, Spill] = {}
        self._fetches: dict[Copy, Fetch] = {}
        self._fetches_by_digest: dict[bytes, Fetch] = {}
        """By the first page wanted."""

    # --- host to files ----------------------------------------------------------------------

    def spill(self, node: TreeNode, start: int) -> None:
        """Write the stretch `[start, node.end)` of a path on the host, where files lack it."""
        key = b"".join(edge.key for edge in reversed(list(self._tree.edges(node, 0))))
        host_slots = self._tree.path_host_indices(node, start)
        step = self._page_size * max(1, SPILL_BYTES_MAX // self._pages.page_bytes)
        for first, stop in pairwise([*range(start, node.end, step), node.end]):
            copy = Copy(is_urgent=False)
            self._set_spill(
                copy,
                key[: stop * TOKEN_BYTES],
                node.extra_key,
                host_slots[first - start : stop - start],
            )
            self._tree.host_lock(node)
            self._spills[copy] = Spill(copy, node)
            self.copier.submit(copy)

    def _set_spill(
        self, copy: Copy, key: bytes, extra_key: ExtraKey, host_slots: SlotIndices
    ) -> None:
        """The last pages of `key` are in `host_slots`."""

        def write(copy: Copy) -> None:
            digests = self._digests(key, extra_key)
            self._keep_before(digests, host_slots)
            for digest, tokens, slot in self._by_page(key, digests, host_slots):
                if copy.is_cancelled:
                    return
                self.files.put(digest, tokens, self._pages.page(slot))

        copy.work = write

    # --- files to host ----------------------------------------------------------------------

    def fetch(self, waiter: Waiter, above: TreeNode, room: int, tokens_min: int) -> int:
        """Have pages beyond `above`, where the tree ends, read; returns how many tokens.

        At most `room` tokens and what the host can take; nothing if files have less than
        `tokens_min`.
        """
        length = (len(waiter.token_ids) - 1) // self._page_size * self._page_size
        if length <= above.end or self._is_overdue():
            return 0
        # Below an edge that is on the device alone it would leave a gap on the host.
        if above.parent is not None and not above.on_host:
            return 0
        key = np.ascontiguousarray(waiter.token_ids[:length], dtype="<i4").tobytes()
        first = above.end // self._page_size
        last = first + max(0, room) // self._page_size
        wanted = self._digests(key, waiter.kv.extra_key)[first:last]
        found = list(takewhile(self.files.has, wanted))
        if not found or len(found) * self._page_size < tokens_min:
            return 0
        under_way = self._fetches_by_digest.get(found[0])
        if under_way is None:
            under_way = self._begin_fetch(waiter, above, key, found)
        if under_way is None:
            return 0
        under_way.waiters.append(waiter)
        # One that was under way may bring more, or less, than is wanted here.
        return min(len(found), len(under_way.digests)) * self._page_size

    def _begin_fetch(
        self, waiter: Waiter, above: TreeNode, key: bytes, digests: list[bytes]
    ) -> Fetch | None:
        self._tree.host_lock(above)
        digests = digests[: self._tree.host_room() // self._page_size]
        if not digests:
            self._tree.host_unlock(above)
            return None
        host_slots = self._tree.take_host_slots(len(digests) * self._page_size)
        assert host_slots is not None, "the host had room"
        end = (above.end + len(host_slots)) * TOKEN_BYTES
        extra_key = waiter.kv.extra_key
        copy = Copy(is_urgent=True)
        deadline = self.clock.now() + FETCH_PATIENCE_S
        fetch = Fetch(copy, above, key[:end], extra_key, host_slots, digests, deadline)

        def read(copy: Copy) -> None:
            self._keep_before(self._digests(fetch.key, extra_key), host_slots)
            for digest, tokens, slot in self._by_page(fetch.key, digests, host_slots):
                if not self.files.get(digest, tokens, self._pages.page(slot)):
                    return
                fetch.pages_read += 1

        copy.work = read
        self._fetches[copy] = self._fetches_by_digest[digests[0]] = fetch
        self.copier.submit(copy)
        return fetch

    def _end_fetch(self, fetch: Fetch) -> None:
        """Hang what was read on the tree, unless somebody has put it there meanwhile."""
        del self._fetches_by_digest[fetch.digests[0]]
        start = fetch.above.end
        key = fetch.key[: (start + fetch.pages_read * self._page_size) * TOKEN_BYTES]
        tokens = np.frombuffer(key, dtype="<i4")
        best = self._tree.match_again(tokens, fetch.extra_key).best_match_node
        first = stop = best.end - start
        if best.parent is None or best.on_host:
            stop = len(tokens) - start
        if first < stop:
            priority = max((waiter.kv.priority for waiter in fetch.waiters), default=0)
            kept = fetch.host_slots[first:stop].copy()
            self._tree.add_host_leaf(best, key, kept, fetch.extra_key, priority)
        self._tree.host_slots.free(fetch.host_slots[:first])
        self._tree.host_slots.free(fetch.host_slots[stop:])
        self._tree.host_unlock(fetch.above)

    # --- both ways --------------------------------------------------------------------------

    def collect(self) -> list[Waiter]:
        """Settle copies that are done; returns who waited for them, or has waited long enough."""
        waiters: list[Waiter] = []
        for done in self.copier.take_done():
            # The file tier survives and tells trouble with the disk: what is left is a bug.
            if done.error is not None:
                raise done.error
            spill = self._spills.pop(done.copy, None)
            if spill is not None:
                self._tree.host_unlock(spill.node)
                continue
            fetch = self._fetches.pop(done.copy)
            self._end_fetch(fetch)
            waiters += fetch.waiters
        return waiters + self._out_of_patience()

    def _out_of_patience(self) -> list[Waiter]:
        waiters: list[Waiter] = []
        now = self.clock.now()
        for fetch in self._fetches.values():
            if fetch.waiters and fetch.deadline <= now:
                _LOG.warning(
                    "%d pages of KV did not come from files within %g s",
                    len(fetch.digests),
                    FETCH_PATIENCE_S,
                )
                waiters += fetch.waiters
                fetch.waiters = []
        return waiters

    def _is_overdue(self) -> bool:
        """Whether files keep somebody waiting for too long."""
        now = self.clock.now()
        return any(fetch.deadline <= now for fetch in self._fetches.values())

    def forget(self, kv: RequestKV) -> None:
        """The request no longer waits."""
        for fetch in self._fetches.values():
            fetch.waiters[:] = [waiter for waiter in fetch.waiters if waiter.kv is not kv]

    def close(self) -> None:
        """End the copier, and let others use the folder."""
        self.copier.close()
        self.files.close()

    # --- reading ----------------------------------------------------------------------------

    @property
    def copies_in_flight(self) -> int:
        """Copies that have not been settled."""
        return len(self._spills) + len(self._fetches)

    @property
    def loading(self) -> int:
        """Host slots reserved for pages from files."""
        return sum(len(fetch.host_slots) for fetch in self._fetches.values())

    def host_locked(self) -> Iterator[TreeNode]:
        """Where each path ends that is locked on the host."""
        yield from (spill.node for spill in self._spills.values())
        yield from (fetch.above for fetch in self._fetches.values())

    def owned(self) -> Iterator[tuple[str, SlotIndices]]:
        """Host slots that belong to copies."""
        for fetch in self._fetches.values():
            yield f"fetch below {fetch.above!r}", fetch.host_slots

    def _keep_before(self, digests: Sequence[bytes], host_slots: SlotIndices) -> None:
        """What goes before the last pages, those in `host_slots`, is as recently used as they are.

        Requests find it in memory, so that its files would grow old, be evicted, and leave all
        that hangs on them out of reach of the next process. What is deepest goes first.
        """
        before = digests[: len(digests) - len(host_slots) // self._page_size]
        self.files.keep(reversed(before))

    def _digests(self, key: bytes, extra_key: ExtraKey) -> list[bytes]:
        tokens = np.frombuffer(key, dtype="<i4")
        return page_digests(self._pages.page_hash, extra_key, tokens, self._page_size)

    def _by_page(
        self, key: bytes, digests: Sequence[bytes], host_slots: SlotIndices
    ) -> Iterator[tuple[bytes, bytes, int]]:
        """(digest, tokens, first slot) of each page: the last ones of key and digests."""
        slots = host_slots[:: self._page_size].tolist()
        step = self._page_size * TOKEN_BYTES
        first = len(key) - step * len(slots)
        for index, (digest, slot) in enumerate(zip(digests[-len(slots) :], slots, strict=True)):
            yield digest, key[first + index * step : first + (index + 1) * step], slot
