"""The host tier: what is copied between device and host, when, and who owns what meanwhile.

| copy | device slots | host slots | locked while it runs |
|---|---|---|---|
| write | the index's, read | its own (`writing`), then the index's | the host's part before it |
| load | its own (`loading`), then the index's | the index's, read | both ends of its stretch |

A write holds no lock on the device, so that it never makes eviction fail: an edge that is evicted
while it is written has its write finished first. A load lives as long as a request waits for it.
Where a write finds no room on the host, or fails, the KV stays on the device alone.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from kvferry.accounts import HostAccounts
from kvferry.config import WritePolicy
from mem_cache.copier import Copy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvferry.config import HostTierConfig
    from kvferry.ids import SlotIndices
    from mem_cache.copier import Copier
    from mem_cache.host_files import HostFiles
    from mem_cache.host_pool import HostPool
    from mem_cache.request_kv import RequestKV
    from mem_cache.slot_allocator import SlotAllocator
    from mem_cache.tiered_radix_cache import TieredRadixCache
    from mem_cache.tree_node import MatchResult, TreeNode
    from mem_cache.waiter import Waiter

_LOG = logging.getLogger(__name__)

_HITS_WORTH_A_COPY = 2
"""Of the policy `write_through_selective`."""


@dataclass(slots=True, eq=False)
class Transfer:
    """A stretch `[start, node.end)` of a path on its way between tiers.

    Its edges may be split meanwhile: `node` stays the last one.
    """

    copy: Copy
    is_load: bool
    node: TreeNode
    start: int
    slots: SlotIndices
    host_slots: SlotIndices
    above: TreeNode | None
    """The edge before the stretch, locked: of a load on the device; of a write on the host, and
    None where nothing is there to lock."""
    waiters: list[Waiter] = field(default_factory=list)

    def part(self, edge: TreeNode, slots: SlotIndices) -> SlotIndices:
        """A copy of what belongs to one edge."""
        return slots[edge.start - self.start : edge.end - self.start].copy()


@dataclass(slots=True)
class TierStatistics:
    """What the host tier has done, in tokens."""

    written: int = 0
    loaded: int = 0
    skipped: int = 0
    """Not written: no room that could be evicted."""
    failed: int = 0
    """In copies that failed, either way."""


class HostTier:
    """Keeps the host's part of a `TieredRadixCache` up to date. The engine thread's."""

    def __init__(
        self,
        tree: TieredRadixCache,
        allocator: SlotAllocator,
        pages: HostPool,
        copier: Copier,
        config: HostTierConfig,
        files: HostFiles | None = None,
    ) -> None:
        self.tree = tree
        self.pages = pages
        self.statistics = TierStatistics()
        self.copier = copier
        self.files = files
        self._allocator = allocator
        self._policy = config.write_policy
        self._load_tokens_min = config.load_back_tokens_min
        self._transfers: dict[Copy, Transfer] = {}
        tree.before_eviction = self._before_eviction

    def when_done(self, wake: Callable[[], None]) -> None:
        """Have `wake` called, from another thread, when there is something to collect."""
        self.copier.on_done = wake
        if self.files is not None:
            self.files.copier.on_done = wake

    # --- device to host ---------------------------------------------------------------------

    def published(self, node: TreeNode) -> None:
        """The path to `node` is on the device now."""
        if self._policy is WritePolicy.WRITE_THROUGH:
            self._write(node)

    def was_hit(self, node: TreeNode) -> None:
        """A request found the path to `node` on the device."""
        if self._policy is not WritePolicy.WRITE_THROUGH_SELECTIVE:
            return
        # Hits never grow along a path.
        while node.parent is not None and node.hit_count < _HITS_WORTH_A_COPY:
            node = node.parent
        self._write(node)

    def _write(self, node: TreeNode) -> None:
        """Begin to copy what the path to `node` lacks on the host."""
        edges = []
        above = node
        while above.parent is not None and not above.on_host and above.in_flight is None:
            edges.append(above)
            above = above.parent
        if not edges:
            return
        length = node.end - above.end
        # Above may itself be on its way: nothing to lock then.
        locked = above if above.on_host else None
        if locked is not None:
            self.tree.host_lock(locked)
        host_slots = self.tree.take_host_slots(length)
        if host_slots is None:
            self.statistics.skipped += length
            if locked is not None:
                self.tree.host_unlock(locked)
            return
        slots = self.tree.path_device_indices(node, above.end)
        transfer = Transfer(Copy(False), False, node, above.end, slots, host_slots, locked)
        self._submit(transfer, edges)

    def _end_write(self, transfer: Transfer, error: Exception | None) -> None:
        edges = self._unmarked(transfer)
        before = edges[-1].parent
        assert before is not None, "an edge has one before it"
        # What goes before it may have failed, or been evicted again: the host has no gaps.
        if error is None and (before.parent is None or before.on_host):
            for edge in edges:
                self.tree.keep(edge, transfer.part(edge, transfer.host_slots))
            self.statistics.written += len(transfer.host_slots)
            if self.files is not None:
                self.files.spill(transfer.node, transfer.start)
        else:
            self.tree.host_slots.free(transfer.host_slots)
        if transfer.above is not None:
            self.tree.host_unlock(transfer.above)

    def _before_eviction(self, node: TreeNode) -> None:
        if node.on_host:
            return
        if self._policy is WritePolicy.WRITE_BACK:
            self._write(node)
        # First what goes before it, without which the host would not take it.
        writes = [edge.in_flight for edge in self.tree.edges(node, 0) if not edge.on_host]
        for copy in reversed(dict.fromkeys(writes)):
            if copy is not None:
                self._end(copy, self.copier.finish(copy))

    # --- host to device ---------------------------------------------------------------------

    def load(
        self,
        waiter: Waiter,
        match: MatchResult,
        room: int,
        take: Callable[[int], SlotIndices],
    ) -> int:
        """Have what lower tiers hold beyond the device's part of `match` loaded.

        Returns how many tokens are coming. First to the host what is in files; the rest is asked
        for when that is there. `take` gives device slots, up to `room` of them. The device's part
        is locked by the waiter.
        """
        device, best = match.last_device_node, match.best_match_node
        on_host = best.end - device.end
        if self.files is not None:
            tokens_min = self._load_tokens_min - on_host
            fetched = self.files.fetch(waiter, best, room - on_host, tokens_min)
            if fetched > 0:
                return on_host + fetched
        if on_host < self._load_tokens_min:
            return 0
        for edge in self.tree.edges(best, device.end):
            if edge.in_flight is not None:
                # Somebody waits for it already. What lies beyond is asked for when it is there.
                self._transfers[edge.in_flight].waiters.append(waiter)
                return edge.end - device.end
        length = min(on_host, room)
        if length < self._load_tokens_min:
            return 0
        transfer = self._load(device, self.tree.edge_ending_at(best, device.end + length), take)
        transfer.waiters.append(waiter)
        return length

    def _load(
        self, device: TreeNode, node: TreeNode, take: Callable[[int], SlotIndices]
    ) -> Transfer:
        # Locked first: room is made by eviction, in both tiers.
        self.tree.lock(device)
        self.tree.host_lock(node)
        slots = take(node.end - device.end)
        host_slots = self.tree.path_host_indices(node, device.end)
        transfer = Transfer(Copy(True), True, node, device.end, slots, host_slots, device)
        self._submit(transfer, list(self.tree.edges(node, device.end)))
        return transfer

    def _end_load(self, transfer: Transfer, *, is_good: bool) -> None:
        for edge in self._unmarked(transfer):
            slots = transfer.part(edge, transfer.slots)
            # Somebody may have computed and published the same tokens meanwhile.
            if not is_good or edge.on_device:
                self._allocator.free(slots)
            else:
                self.tree.fill(edge, slots)
        if is_good:
            self.statistics.loaded += len(transfer.slots)
        self.tree.host_unlock(transfer.node)
        assert transfer.above is not None, "a load locks the device's end of its path"
        self.tree.unlock(transfer.above)

    def forget(self, kv: RequestKV) -> None:
        """The request no longer waits; a load that nobody waits for is given up, slots and all."""
        if self.files is not None:
            self.files.forget(kv)
        for transfer in self._transfers.values():
            kept = [waiter for waiter in transfer.waiters if waiter.kv is not kv]
            if len(kept) == len(transfer.waiters):
                continue
            transfer.waiters[:] = kept
            if not kept:
                self.copier.cancel(transfer.copy)
                del self._transfers[transfer.copy]
                self._end_load(transfer, is_good=False)
            return

    # --- both ways --------------------------------------------------------------------------

    def collect(self) -> list[tuple[Waiter, bool]]:
        """Settle copies that are done; returns who waited for them, and whether it succeeded."""
        ended: list[tuple[Waiter, bool]] = []
        if self.files is not None:
            ended += [(waiter, True) for waiter in self.files.collect()]
        for done in self.copier.take_done():
            transfer = self._end(done.copy, done.error)
            ended += [(waiter, done.error is None) for waiter in transfer.waiters]
        return ended

    def _submit(self, transfer: Transfer, edges: list[TreeNode]) -> None:
        for edge in edges:
            edge.in_flight = transfer.copy
        move = self.pages.load if transfer.is_load else self.pages.store
        slots, host_slots = transfer.slots, transfer.host_slots
        transfer.copy.work = lambda copy: move(slots, host_slots, lambda: copy.is_cancelled)
        self._transfers[transfer.copy] = transfer
        self.copier.submit(transfer.copy)

    def _end(self, copy: Copy, error: Exception | None) -> Transfer:
        transfer = self._transfers.pop(copy)
        if error is not None:
            way = "from" if transfer.is_load else "to"
            self.statistics.failed += len(transfer.slots)
            _LOG.warning(
                "copying %d tokens %s the host failed: %r", len(transfer.slots), way, error
            )
        if transfer.is_load:
            self._end_load(transfer, is_good=error is None)
        else:
            self._end_write(transfer, error)
        return transfer

    def _unmarked(self, transfer: Transfer) -> list[TreeNode]:
        """The transfer's edges, last one first, no longer in flight."""
        edges = list(self.tree.edges(transfer.node, transfer.start))
        for edge in edges:
            assert edge.in_flight is transfer.copy, f"{edge} is in another copy"
            edge.in_flight = None
        return edges

    # --- reading ----------------------------------------------------------------------------

    @property
    def copies_in_flight(self) -> int:
        """Copies that have not been settled, those with files included."""
        files = 0 if self.files is None else self.files.copies_in_flight
        return len(self._transfers) + files

    @property
    def loading(self) -> int:
        """Device slots reserved for loads."""
        return sum(len(transfer.slots) for transfer in self._transfers.values() if transfer.is_load)

    def loading_for(self, kvs: Iterable[RequestKV]) -> int:
        """Device slots reserved for loads that any of these requests waits for."""
        waiting = set(kvs)
        return sum(
            len(transfer.slots)
            for transfer in self._transfers.values()
            if any(waiter.kv in waiting for waiter in transfer.waiters)
        )

    def transfers(self) -> Iterator[Transfer]:
        """Every copy in flight."""
        return iter(self._transfers.values())

    def accounts(self) -> HostAccounts:
        """Every host slot by its owner."""
        writes = (transfer for transfer in self._transfers.values() if not transfer.is_load)
        return HostAccounts(
            free=self.tree.host_slots.num_free,
            evictable=self.tree.host_evictable_size(),
            protected=self.tree.host_protected_size(),
            writing=sum(len(write.host_slots) for write in writes),
            loading=0 if self.files is None else self.files.loading,
            total=self.pages.num_slots,
        )

    def counters(self) -> dict[str, int]:
        """Of both lower tiers: tokens copied to and from host memory, pages in files."""
        told = {f"host_tokens_{name}": count for name, count in asdict(self.statistics).items()}
        if self.files is not None:
            files = asdict(self.files.files.statistics())
            told |= {f"file_tier_{name}": count for name, count in files.items()}
        return told

    def close(self) -> None:
        """End the copiers. Copies in flight are lost."""
        self.copier.close()
        if self.files is not None:
            self.files.close()
