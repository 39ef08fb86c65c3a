"""The one place that chooses implementations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.kv_events import event_block_tokens
from mem_cache.chunk_cache import ChunkCache
from mem_cache.kv_cache import KVCache
from mem_cache.kv_pool import slots_for_budget
from mem_cache.pool_choice import build_kv_pool
from mem_cache.radix_cache import RadixCache
from mem_cache.req_to_token_pool import ReqToTokenPool
from mem_cache.slot_allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

if TYPE_CHECKING:
    from kvferry.config import CacheConfig
    from mem_cache.layout import PagedLayout
    from mem_cache.slot_allocator import SlotAllocator
    from mem_cache.tree_node import PrefixCache


def build_kv_cache(
    layout: PagedLayout, config: CacheConfig, context_length: int, device: str = "cpu"
) -> KVCache:
    """A worker's KV, sized by `config.memory_bytes`.

    `layout.page_size` is what counts; it comes from `config.page_size`. Raises `ConfigError` if
    the budget cannot hold one request of `context_length` tokens.
    """
    assert layout.page_size == config.page_size, "layout and configuration differ in page size"
    num_slots = slots_for_budget(config.memory_bytes, layout, config.rows, context_length)
    return assemble_kv_cache(layout, config, num_slots, context_length, device)


def assemble_kv_cache(
    layout: PagedLayout,
    config: CacheConfig,
    num_slots: int,
    context_length: int,
    device: str = "cpu",
) -> KVCache:
    """As `build_kv_cache`, with a given number of usable slots (whole pages)."""
    # Pages are written to the row whole, so a row ends at a page's end.
    width = layout.round_up(context_length)
    return KVCache(
        layout,
        build_kv_pool(layout, num_slots, device),
        ReqToTokenPool(config.rows, width, device),
        _allocator(num_slots, layout.page_size),
        _tree(config, layout.page_size),
        context_length=context_length,
        auditing=config.audit,
    )


def _allocator(num_slots: int, page_size: int) -> SlotAllocator:
    if page_size == 1:
        return TokenToKVPoolAllocator(num_slots)
    return PagedTokenToKVPoolAllocator(num_slots, page_size)


def _tree(config: CacheConfig, page_size: int) -> PrefixCache:
    if not config.radix:
        return ChunkCache()
    return RadixCache(page_size, event_block_tokens(page_size), config.eviction)
