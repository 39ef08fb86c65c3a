"""Which pool holds the KV of which layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mem_cache.layout import KvLayout, MlaLayout, PagedLayout
from mem_cache.mha_pool import MHATokenToKVPool
from mem_cache.mla_pool import MLATokenToKVPool

if TYPE_CHECKING:
    from mem_cache.kv_pool import KvPool


def build_kv_pool(layout: PagedLayout, num_slots: int, device: str = "cpu") -> KvPool:
    """A pool of `num_slots` usable slots (whole pages) and the dummy page."""
    match layout:
        case KvLayout():
            return MHATokenToKVPool(layout, num_slots, device)
        case MlaLayout():
            return MLATokenToKVPool(layout, num_slots, device)
        case _:
            raise AssertionError(f"no pool for {layout}")
