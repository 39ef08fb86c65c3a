"""The KV side of one request: a row and four lengths; everything else is derived."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.cache_key import Sharing

if TYPE_CHECKING:
    from kvferry.ids import AttemptId, ExtraKey
    from mem_cache.tree_node import TreeNode


@dataclass(slots=True, eq=False)
class RequestKV:
    """Who owns which interval of a request's row. Changed by `KVCache` alone.

    `[0, window_start)` is given up: no token to come reads it;
    `[window_start, cache_protected_len)` belongs to the tree, locked by this request;
    `[cache_protected_len, committed_len)` is the request's own, computed;
    `[committed_len, allocated_len)` is the request's own, K/V not there yet. All but
    `committed_len` are whole pages, so each page of the row has one owner.
    """

    request_id: AttemptId | str
    extra_key: ExtraKey
    last_node: TreeNode
    """Where the locked path ends; the tree's root when nothing is locked."""
    sharing: Sharing = Sharing.SHARED
    priority: int = 0
    """What it publishes is kept longer, the higher; under the eviction policy `priority` only."""
    inbound: bool = False
    """A handoff is filling it: not to be read, matched or published before `adopt`."""
    req_pool_idx: int | None = None
    """Its row; None before `open` and after `release`."""
    req_generation: int = 0
    prefix_len: int = 0
    """Tokens found in the tree when the request was opened, and those that were loaded since."""
    window_start: int = 0
    """Where what it holds begins; above 0 with a sliding window only."""
    cache_protected_len: int = 0
    cache_inserted_len: int = 0
    """Tokens of the row that this request itself published: they are no hit."""
    committed_len: int = 0
    allocated_len: int = 0
    loading_len: int = 0
    """Tokens after `allocated_len` that a lower tier is sending; 0 when no load is in flight."""
    loading_slots: int = 0
    """Slots reserved for them; 0 while what is coming is still in files."""
    host_hit_len: int = 0
    """Tokens by which waiting for lower tiers made the prefix longer."""
    pins: int = 0
    """Open handoffs that read this row. It cannot be released before they closed."""

    @property
    def private_len(self) -> int:
        """Slots of the row that the tree does not own."""
        return self.allocated_len - self.cache_protected_len

    def check_intervals(self) -> None:
        """Ledger check 4: the intervals are disjoint and none is negative."""
        ends = (self.window_start, self.cache_protected_len, self.committed_len, self.allocated_len)
        assert list(ends) == sorted(ends), f"check 4: intervals are not in order: {self}"
        assert self.window_start >= 0, f"check 4: intervals are not in order: {self}"

    def __repr__(self) -> str:
        return (
            f"RequestKV({self.request_id}, row {self.req_pool_idx}, "
            f"window_start {self.window_start}, "
            f"cache_protected_len {self.cache_protected_len}, "
            f"committed_len {self.committed_len}, allocated_len {self.allocated_len}"
            f"{', inbound' if self.inbound else ''}, pins {self.pins})"
        )
