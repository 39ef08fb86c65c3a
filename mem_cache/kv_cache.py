"""One worker's KV as a closed loop: rows, slots, bytes and prefix index behind one object.

Every way for a slot to change its owner is a method here; each either succeeds or changes
nothing. Owners of a slot: the allocator (free), the index (evictable or protected), a request
(private, or inbound until its handoff has committed), a copy from a lower tier (loading).

| interval of a row | owner | at checkpoint |
|---|---|---|
| `[0, window_start)` | given up: left of a sliding window | untouched |
| `[window_start, cache_protected_len)` | index, locked | untouched |
| `[cache_protected_len, matched)` | request, a duplicate | freed; kept under a pin |
| `[matched, key_len)` | request | handed to the index |
| `[key_len, allocated_len)` | request: partial page, preallocated tail | stays |

Under a pin the slots of a row stay as they are: a handoff took note of them and reads them from
another thread. So a pinned request that has duplicates publishes nothing until it is unpinned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvferry.accounts import KvAccounts
from kvferry.cache_key import Sharing
from mem_cache.errors import OutOfRows, OutOfSlots
from mem_cache.ledger import audit, held_slots, oom_report, pinned_slots, require_live, require_path
from mem_cache.request_kv import RequestKV
from mem_cache.waiter import Waiter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvferry.accounts import HostAccounts
    from kvferry.ids import AttemptId, ExtraKey, SlotIndices, TokenIds
    from kvferry.kv_events import BlockHash, KvEvent
    from mem_cache.attention_window import AttentionWindow
    from mem_cache.host_tier import HostTier
    from mem_cache.kv_pool import KvPool
    from mem_cache.layout import PagedLayout
    from mem_cache.req_to_token_pool import ReqToTokenPool
    from mem_cache.slot_allocator import SlotAllocator
    from mem_cache.tree_node import MatchResult, PrefixCache, TreeNode


class KVCache:
    """All KV of one worker, for one thread. Made by `mem_cache.factory.build_kv_cache`.

    Per request: `open` once, `load_back` if lower tiers may have more, then `extend` + `commit`
    per step, and `trim` where some of it was a guess, `checkpoint` per prefill chunk, `release`
    once at every kind of end. `fork` for each further sample of a prompt. `poll` once per turn of
    the engine, if only while `copies_in_flight`. A handoff's sink opens `inbound` and calls `adopt`
    when it committed; its source holds a `pin` from the offer to the close.

    With `auditing`, every ledger check runs after every change (slow; for tests).
    """

    def __init__(
        self,
        pool: KvPool,
        rows: ReqToTokenPool,
        allocator: SlotAllocator,
        tree: PrefixCache,
        tier: HostTier | None,
        *,
        context_length: int,
        auditing: bool = False,
    ) -> None:
        self.layout: PagedLayout = pool.layout
        self.pool = pool
        self.rank_pools: tuple[KvPool, ...] = (pool,)
        """One per tensor-parallel rank, each with its heads of every slot; `pool` is rank 0's."""
        self.rows = rows
        self.allocator = allocator
        self.tree = tree
        self.context_length = context_length
        self.auditing = auditing
        self.tier = tier
        self.on_copy_done: Callable[[], None] = lambda: None
        """Called from another thread when `poll` has something to finish."""
        if tier is not None:
            tier.when_done(lambda: self.on_copy_done())
        self._live: dict[int, RequestKV] = {}
        self._slides = tree.window.tokens is not None

    @property
    def page_size(self) -> int:
        """Slots per page."""
        return self.layout.page_size

    @property
    def num_slots(self) -> int:
        """Usable slots: the total of the accounts."""
        return self.allocator.num_slots

    @property
    def window(self) -> AttentionWindow:
        """Which positions the next tokens of a request read."""
        return self.tree.window

    @property
    def copies_in_flight(self) -> int:
        """Copies between tiers that `poll` will finish."""
        return 0 if self.tier is None else self.tier.copies_in_flight

    # --- the life of a request --------------------------------------------------------------

    def open(
        self,
        request_id: AttemptId | str,
        token_ids: TokenIds,
        extra_key: ExtraKey,
        *,
        inbound: bool = False,
        sharing: Sharing = Sharing.SHARED,
        priority: int = 0,
    ) -> RequestKV:
        """Give a request its row, with the cached prefix of `token_ids` locked and written to it.

        At most `len(token_ids) - 1` tokens are matched: the last one must be computed for its
        logits. An inbound request may match all: its source has computed them. Raises
        `OutOfRows`, with nothing changed.
        """
        if self.rows.num_free == 0:
            raise OutOfRows(1, self.oom_report())
        kv = RequestKV(request_id, extra_key, self.tree.root, sharing, priority, inbound)
        if sharing is Sharing.SHARED:
            limit = len(token_ids) if inbound else max(0, len(token_ids) - 1)
            match = self.tree.match_prefix(token_ids[:limit], extra_key)
            # Locked before anything else may evict: a matched node is only borrowed.
            kv.last_node = match.last_device_node
        kv.window_start = start = self.window.needed_from(kv.last_node.end)
        self.tree.lock(kv.last_node, start)
        (row,) = self.rows.alloc([kv]) or (0,)
        self.rows.write(row, 0, np.zeros(start, dtype=np.int64))
        self.rows.write(row, start, self.tree.path_device_indices(kv.last_node, start))
        self._has_prefix(kv)
        self._live[row] = kv
        if self.tier is not None:
            self.tier.was_hit(kv.last_node)
        self._changed()
        return kv

    def fork(self, kv: RequestKV, request_id: AttemptId | str) -> RequestKV:
        """Another request with the same computed tokens, as `kv` has them now.

        It shares what the index has of them, `[0, cache_protected_len)`, and gets a copy of the
        rest: right after a checkpoint, less than a page, or all of it where nothing is published.
        Raises `OutOfRows` or `OutOfSlots`, with nothing changed.
        """
        parents_row = require_live(self, kv)
        assert not kv.inbound, f"{kv}: inbound KV cannot be read"
        assert kv.loading_len == 0, f"{kv} is being loaded"
        if self.rows.num_free == 0:
            raise OutOfRows(1, self.oom_report())
        shared, computed = kv.cache_protected_len, kv.committed_len
        # Evicts nothing of ours: the parent's lock holds what will be shared.
        own = self._take(self.layout.round_up(computed) - shared)
        twin = RequestKV(request_id, kv.extra_key, kv.last_node, kv.sharing, kv.priority)
        self.tree.lock(kv.last_node, kv.window_start)
        (row,) = self.rows.alloc([twin]) or (0,)
        self.rows.write(row, 0, self.rows.read(parents_row, 0, shared))
        self.rows.write(row, shared, own)
        copied = self.rows.read(parents_row, shared, computed)
        for pool in self.rank_pools:
            pool.copy(copied, own[: computed - shared])
        twin.window_start = kv.window_start
        twin.prefix_len = twin.cache_protected_len = shared
        twin.committed_len, twin.allocated_len = computed, shared + len(own)
        self._live[row] = twin
        self._changed(twin)
        return twin

    def load_back(self, kv: RequestKV, token_ids: TokenIds) -> int:
        """Begin to copy what the host holds of `token_ids`; returns how many tokens are coming.

        Called once, right after `open`, with the same tokens. 0: nothing is coming. Otherwise the
        request can only be released until `poll` returns it, with a longer prefix or, if the copy
        failed, as it was. What is coming needs no more slots than the request itself would.
        """
        require_live(self, kv)
        assert kv.loading_len == 0, f"{kv} is being loaded already"
        if self.tier is None or kv.inbound or kv.sharing is not Sharing.SHARED:
            return 0
        self._grow_and_load(self.tier, Waiter(kv, token_ids))
        self._changed()
        return kv.loading_len

    def poll(self) -> list[RequestKV]:
        """Finish copies that are done; returns the requests whose load has ended."""
        if self.tier is None:
            return []
        arrived = self.tier.collect()
        # All of them hold what came for them before one may evict to load more.
        for waiter, _ in arrived:
            waiter.kv.loading_len = waiter.kv.loading_slots = 0
            before = waiter.kv.prefix_len
            self._grow(waiter.kv, self._match_again(self.tier, waiter).last_device_node)
            waiter.kv.host_hit_len += waiter.kv.prefix_len - before
        for waiter, is_good in arrived:
            if is_good:
                self._grow_and_load(self.tier, waiter)
        self._changed()
        return [waiter.kv for waiter, _ in arrived if waiter.kv.loading_len == 0]

    def extend(self, kv: RequestKV, new_len: int) -> SlotIndices:
        """As `have_slots`; returns the slots of positions `[committed_len, new_len)`."""
        self.have_slots(kv, new_len)
        return self.rows.read(require_live(self, kv), kv.committed_len, new_len)

    def have_slots(self, kv: RequestKV, new_len: int) -> None:
        """Have slots for positions `[0, new_len)`, in its row.

        The rest of the last page is used before new pages are taken; unlocked cache is evicted as
        needed. What has left the window is given up first; it could be published until then.
        Raises `OutOfSlots`, with nothing else changed.
        """
        row = require_live(self, kv)
        assert kv.loading_len == 0, f"{kv} is being loaded"
        assert kv.committed_len <= new_len <= self.context_length, (
            f"{kv} cannot be extended to {new_len} of {self.context_length} tokens"
        )
        if self._slides:
            self._slide(kv, row)
        if new_len > kv.allocated_len:
            needed = self.layout.round_up(new_len) - kv.allocated_len
            self.rows.write(row, kv.allocated_len, self._take(needed))
            kv.allocated_len += needed
            self._changed()

    def commit(self, kv: RequestKV, new_len: int) -> None:
        """K/V of `[committed_len, new_len)` is in the pool now."""
        require_live(self, kv)
        assert kv.loading_len == 0, f"{kv} is being loaded"
        assert kv.committed_len <= new_len <= kv.allocated_len, f"{kv} cannot commit {new_len}"
        kv.committed_len = new_len

    def trim(self, kv: RequestKV) -> None:
        """Give back the pages in which nothing is computed: `extend` took them for tokens that
        did not come. Not from under a pin; `release` frees them in any case."""
        row = require_live(self, kv)
        assert not kv.inbound, f"{kv}: a handoff is about to fill its slots"
        assert kv.loading_len == 0, f"{kv} is being loaded"
        kept = self.layout.round_up(kv.committed_len)
        if kept == kv.allocated_len or kv.pins > 0:
            return
        self.allocator.free(self.rows.read(row, kept, kv.allocated_len))
        kv.allocated_len = kept
        self._changed()

    def checkpoint(self, kv: RequestKV, token_ids: TokenIds) -> None:
        """Publish the first `len(token_ids)` <= `committed_len` tokens, whole pages of them.

        Copies slot numbers, never K/V. Afterwards the row reads the index's slots, so that every
        slot of the row below `cache_protected_len` is the canonical one for its tokens. Where that
        would give up slots of a pinned request, nothing changes: a later checkpoint does it.
        """
        row = require_live(self, kv)
        assert kv.loading_len == 0, f"{kv} is being loaded"
        assert not kv.inbound, f"{kv}: inbound KV is published only after its handoff committed"
        assert len(token_ids) <= kv.committed_len, f"{kv} has not computed {len(token_ids)} tokens"
        key_len = self.layout.round_down(len(token_ids))
        start = kv.cache_protected_len
        if kv.sharing is Sharing.PRIVATE or key_len <= start:
            return
        # `read` copies: the row is rewritten below, and reused by others later.
        own = self.rows.read(row, 0, key_len)
        result = self.tree.insert(
            token_ids[:key_len],
            own,
            kv.extra_key,
            owned_from=start,
            priority=kv.priority,
            keeps_own=kv.pins > 0,
        )
        node, matched = result.last_node, result.matched_len
        if node.end <= start:
            return
        assert matched >= start, f"{kv}: the index lost a locked prefix, or tokens changed"
        assert node.end == key_len, f"{kv}: the index took {node.end} of {key_len} tokens"
        self.allocator.free(result.duplicates)
        self.rows.write(row, start, self.tree.path_device_indices(node, start))
        self.tree.lock(node, kv.window_start)
        self.tree.unlock(kv.last_node, kv.window_start)
        kv.last_node = node
        kv.cache_protected_len = node.end
        kv.cache_inserted_len += node.end - matched
        if self.tier is not None:
            self.tier.published(node)
        self._changed(kv)

    def adopt(self, kv: RequestKV) -> None:
        """The handoff committed: inbound slots become the request's own."""
        require_live(self, kv)
        assert kv.inbound, f"{kv} is not inbound"
        kv.inbound = False
        self._changed()

    def pin(self, kv: RequestKV) -> None:
        """A handoff reads this row: before the matching `unpin` none of its slots is given up."""
        require_live(self, kv)
        assert not kv.inbound, f"{kv}: inbound KV cannot be read"
        assert kv.loading_len == 0, f"{kv} is being loaded"
        kv.pins += 1

    def unpin(self, kv: RequestKV) -> None:
        """The handoff closed."""
        require_live(self, kv)
        assert kv.pins > 0, f"{kv} has no pin"
        kv.pins -= 1

    def release(self, kv: RequestKV, token_ids: TokenIds | None) -> None:
        """End a request, whatever the reason: the one function that frees a request's slots.

        Publishes the computed part of `token_ids` (None: publish nothing), frees the rest,
        unlocks, frees the row. Inbound KV is never published, whatever `token_ids` is.
        """
        row = require_live(self, kv)
        assert kv.pins == 0, f"{kv} is still read by a handoff"
        if self.tier is not None and kv.loading_len > 0:
            self.tier.forget(kv)
            kv.loading_len = kv.loading_slots = 0
        if token_ids is not None and not kv.inbound:
            self.checkpoint(kv, token_ids[: kv.committed_len])
        kv.check_intervals()
        # Committed rest and preallocated tail at once: they may share a page.
        self.allocator.free(self.rows.read(row, kv.cache_protected_len, kv.allocated_len))
        self.tree.unlock(kv.last_node, kv.window_start)
        del self._live[row]
        self.rows.free(kv)
        self._changed()

    # --- reading ----------------------------------------------------------------------------

    def slots(self, kv: RequestKV, start: int, stop: int) -> SlotIndices:
        """Slots of positions `[start, stop)`, a copy."""
        row = require_live(self, kv)
        in_order = kv.window_start <= start <= stop <= kv.allocated_len
        assert in_order, f"{kv} has no slots [{start}, {stop})"
        return self.rows.read(row, start, stop)

    def live_requests(self) -> tuple[RequestKV, ...]:
        """Every request that holds a row."""
        return tuple(self._live.values())

    def accounts(self) -> KvAccounts:
        """Every slot by its owner."""
        live = self._live.values()
        private = inbound = 0
        for kv in live:
            if kv.inbound:
                inbound += kv.private_len
            else:
                private += kv.private_len
        return KvAccounts(
            free=self.allocator.num_free,
            evictable=self.tree.evictable_size(),
            protected=self.tree.protected_size(),
            private=private,
            inbound=inbound,
            loading=0 if self.tier is None else self.tier.loading,
            total=self.num_slots,
            outbound_pinned=pinned_slots(live),
            rows_live=len(self._live),
            rows_total=self.rows.num_rows,
        )

    def host_accounts(self) -> HostAccounts | None:
        """Every host slot by its owner; None without a host tier."""
        return None if self.tier is None else self.tier.accounts()

    @property
    def counters(self) -> dict[str, int]:
        """What the lower tiers did since the start; empty without any."""
        return {} if self.tier is None else self.tier.counters()

    def free_or_evictable(self) -> int:
        """Slots a request could get now, at the cost of cache."""
        return self.allocator.num_free + self.tree.evictable_size()

    def held_slots(self, kvs: Iterable[RequestKV]) -> int:
        """Slots that stay taken while these requests hold their rows, shared ones counted once.

        All others could be had if every other request were released, but for what is coming for
        these, their `loading_len`. A load that brings more than that holds the rest too.
        """
        kvs = tuple(kvs)
        loading = 0 if self.tier is None else self.tier.loading_for(kvs)
        return held_slots(kvs) + max(0, loading - sum(kv.loading_len for kv in kvs))

    def audit(self) -> None:
        """Run all ledger checks; raises `LedgerError` that lists every violation."""
        audit(self)

    def oom_report(self) -> str:
        """Who holds rows and slots, as text for an error message."""
        return oom_report(self)

    def take_events(self) -> list[KvEvent]:
        """What the index stored and removed since the last call, in order."""
        return self.tree.take_events()

    def snapshot_blocks(self) -> tuple[BlockHash, ...]:
        """Hashes of all blocks in the index."""
        return self.tree.snapshot_blocks()

    def drop_cache(self) -> None:
        """Free everything the index holds, in all tiers in memory. Nothing may be under way."""
        assert not self._live, "cache of live requests cannot be dropped"
        assert self.copies_in_flight == 0, "cache cannot be dropped while it is copied"
        self.allocator.free(self.tree.reset())
        self._changed()

    def close(self) -> None:
        """End what runs beside the engine thread."""
        if self.tier is not None:
            self.tier.close()

    # --- inside -----------------------------------------------------------------------------

    def _has_prefix(self, kv: RequestKV) -> None:
        """All that the request has is the path it locks."""
        held = kv.last_node.end
        kv.prefix_len = kv.cache_protected_len = kv.committed_len = kv.allocated_len = held

    def _slide(self, kv: RequestKV, row: int) -> None:
        """Give up what no token to come reads: own slots come free, the index's are unlocked."""
        start = self.window.slid(kv.window_start, kv.committed_len)
        # What a handoff reads or fills is not for the next token of this worker alone.
        if start == kv.window_start or kv.pins > 0 or kv.inbound:
            return
        if start < kv.cache_protected_len:
            self.tree.lock(kv.last_node, start)
            self.tree.unlock(kv.last_node, kv.window_start)
        else:
            self.allocator.free(self.rows.read(row, kv.cache_protected_len, start))
            self.tree.unlock(kv.last_node, kv.window_start)
            kv.last_node, kv.cache_protected_len = self.tree.root, start
        self.rows.write(row, kv.window_start, np.zeros(start - kv.window_start, dtype=np.int64))
        kv.window_start = start
        self._changed()

    def _match_again(self, tier: HostTier, waiter: Waiter) -> MatchResult:
        limit = max(0, len(waiter.token_ids) - 1)
        return tier.tree.match_again(waiter.token_ids[:limit], waiter.kv.extra_key)

    def _grow(self, kv: RequestKV, node: TreeNode) -> None:
        """The path to `node` is the request's prefix now; it has computed nothing yet."""
        assert kv.allocated_len == kv.prefix_len, f"{kv} has more than its prefix"
        row, start = require_live(self, kv), kv.prefix_len
        self.tree.lock(node)
        self.tree.unlock(kv.last_node)
        kv.last_node = node
        self.rows.write(row, start, self.tree.path_device_indices(node, start))
        self._has_prefix(kv)

    def _grow_and_load(self, tier: HostTier, waiter: Waiter) -> None:
        """Take what is on the device by now; have the rest loaded as far as there is room."""
        match = self._match_again(tier, waiter)
        self._grow(waiter.kv, match.last_device_node)
        room = self.layout.round_down(self.free_or_evictable())
        coming = tier.load(waiter, match, room, self._take)
        waiter.kv.loading_len = coming
        waiter.kv.loading_slots = min(coming, tier.loading_for([waiter.kv]))

    def _take(self, num_slots: int) -> SlotIndices:
        """Fresh slots, whole pages, evicting if need be. Raises `OutOfSlots` before it evicts."""
        slots = self.allocator.alloc(num_slots)
        if slots is not None:
            return slots
        shortage = num_slots - self.allocator.num_free
        evictable = self.tree.evictable_size()
        if evictable < shortage:
            raise OutOfSlots(num_slots, self.free_or_evictable(), self.oom_report())
        evicted = self.tree.evict(shortage)
        assert self.tree.evictable_size() == evictable - len(evicted), (
            "check 5: eviction gave back other slots than its nodes had"
        )
        self.allocator.free(evicted)
        slots = self.allocator.alloc(num_slots)
        assert slots is not None, f"eviction promised {evictable} slots and gave {len(evicted)}"
        return slots

    def _changed(self, kv: RequestKV | None = None) -> None:
        if not self.auditing:
            return
        if kv is not None:
            require_path(self, kv)
        audit(self)
