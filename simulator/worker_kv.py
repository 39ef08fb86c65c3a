"""The KV of a simulated worker, and what is promised of it: `engine.admission`, in pages.

Promises are kept as sums that change with each request, not found anew from all of them. All else
is as there: a new request is promised what is known of it and a share of its longest answer; one
that was retracted comes back only if it can stay, with all that are older (`horizon`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.ids import ExtraKey

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mem_cache.kv_cache import KVCache
    from simulator.held_request import HeldRequest

_SHARED = ExtraKey("")


class WorkerKv:
    """Opens, grows and releases the KV of requests."""

    def __init__(self, cache: KVCache, page_tokens: int) -> None:
        self.cache = cache
        self.page_tokens = page_tokens
        self.horizon = -1
        """Arrival of the youngest request that came back; below 0 before the first."""
        self._holders: dict[HeldRequest, None] = {}
        self._left = 0
        """Pages promised to holders and not taken."""
        self._left_for_others = 0
        """Of these, to prompts that are computed for others."""

    @property
    def available(self) -> int:
        """Pages that are free or can be evicted."""
        return self.cache.free_or_evictable()

    @property
    def slack(self) -> int:
        """Available pages that are promised to nobody."""
        return self.available - self._left

    @property
    def spare(self) -> int:
        """Available pages that a step may take for answers."""
        return self.available - self._left_for_others

    @property
    def has_row(self) -> bool:
        """Whether another request may be opened."""
        return self.cache.rows.num_free > 0

    def try_open(self, request: HeldRequest, kept: int) -> bool:
        """Give a request what is cached of it and its promise, if there is room beside `kept` pages
        that are kept for others. False: nothing has changed."""
        if not self.has_row:
            return False
        # All that is known may come from another worker; of what is computed here, one token is.
        pages = (request.known if request.is_inbound else request.known - 1) // self.page_tokens
        ids = request.ids[: pages + (not request.is_inbound)]
        request.kv = self.cache.open("", ids, _SHARED, inbound=request.is_inbound)
        request.hit = request.computed = request.kv.prefix_len * self.page_tokens
        if not self._fits(request, kept):
            self.cache.release(request.kv, None)
            request.kv, request.computed = None, 0
            return False
        self._holders[request] = None
        self._owe(request, max(0, self.promise_of(request) - request.kv.allocated_len))
        return True

    def grow(self, request: HeldRequest, tokens: int) -> None:
        """Have pages for so many tokens; evicts what is needed. There must be room."""
        kv = request.held_kv
        before, pages = kv.allocated_len, self.pages_of(tokens)
        if pages > before:
            self.cache.extend(kv, pages)
            self._owe(request, max(0, request.left - (pages - before)))

    def computed(self, request: HeldRequest, tokens: int) -> None:
        """The KV of so many tokens is there; what is known of them is published in whole pages."""
        kv, pages = request.held_kv, tokens // self.page_tokens
        request.computed = tokens
        self.cache.commit(kv, max(pages, kv.committed_len))
        self.cache.checkpoint(kv, request.ids[:pages])

    def adopt(self, request: HeldRequest) -> None:
        """All that was known has come from another worker."""
        kv = request.held_kv
        self.cache.adopt(kv)
        self.computed(request, request.known)

    def release(self, request: HeldRequest, tokens: int) -> None:
        """The end: what is computed of the first `tokens` stays as cache."""
        kv, request.kv = request.held_kv, None
        pages = tokens // self.page_tokens
        if not kv.inbound:
            self.cache.commit(kv, max(kv.committed_len, min(pages, kv.allocated_len)))
        self.cache.release(kv, request.ids[:pages])
        self._owe(request, 0)
        del self._holders[request]

    def promise_of(self, request: HeldRequest) -> int:
        """Pages that it may count on in all."""
        is_assured = request.arrival <= self.horizon
        return self.pages_of(request.longest) if is_assured else request.promise

    def pages_of(self, tokens: int) -> int:
        """That hold so many."""
        return -(-tokens // self.page_tokens)

    def check_idle(self) -> None:
        """Assert that nobody holds anything, and run every check of the ledger."""
        self.cache.audit()
        assert not self._holders, f"{len(self._holders)} requests still hold KV"
        assert self._left == self._left_for_others == 0, "pages are promised to nobody"
        assert self.cache.accounts().is_idle, f"check 9: {self.cache.accounts()}"

    def _fits(self, request: HeldRequest, kept: int) -> bool:
        kv = request.held_kv
        if not request.was_retracted:
            wanted = max(0, self.promise_of(request) - kv.allocated_len)
            return kept + wanted <= self.slack
        horizon = max(self.horizon, request.arrival)
        if self._assured_slack([*self._holders, request], horizon) < 0:
            return False
        self.horizon = horizon
        for other in self._holders:
            if other.arrival <= horizon:
                self._owe(other, max(0, self.promise_of(other) - other.held_kv.allocated_len))
        return True

    def _assured_slack(self, holders: Iterable[HeldRequest], horizon: int) -> int:
        """Pages that would be left for others if the assured and those that cannot be retracted had
        all they may take, and everybody else gave up what it has."""
        kept = [
            each
            for each in holders
            if each.arrival <= horizon or each.is_for_other or each.held_kv.inbound
        ]
        to_come = sum(
            max(0, self.pages_of(each.longest) - each.held_kv.allocated_len)
            for each in kept
            if each.arrival <= horizon or each.is_for_other
        )
        return self.cache.num_slots - self.cache.held_slots(e.held_kv for e in kept) - to_come

    def _owe(self, request: HeldRequest, pages: int) -> None:
        self._left += pages - request.left
        if request.is_for_other:
            self._left_for_others += pages - request.left
        request.left = pages
