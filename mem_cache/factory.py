"""The one place that chooses implementations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.errors import ConfigError
from kvferry.kv_events import event_block_tokens
from mem_cache.attention_window import AttentionWindow
from mem_cache.chunk_cache import ChunkCache
from mem_cache.copier import ThreadCopier
from mem_cache.file_tier import FileTier
from mem_cache.host_files import HostFiles
from mem_cache.host_pool import HostPool
from mem_cache.host_tier import HostTier
from mem_cache.kv_cache import KVCache
from mem_cache.kv_pool import slots_for_budget
from mem_cache.pool_choice import build_kv_pool
from mem_cache.radix_cache import RadixCache
from mem_cache.req_to_token_pool import ReqToTokenPool
from mem_cache.slot_allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from mem_cache.tiered_radix_cache import TieredRadixCache
from mem_cache.window_radix_cache import WindowRadixCache

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvferry.config import CacheConfig
    from mem_cache.copier import Copier
    from mem_cache.layout import PagedLayout
    from mem_cache.slot_allocator import SlotAllocator
    from mem_cache.tree_node import PrefixCache


def build_kv_cache(
    layout: PagedLayout,
    config: CacheConfig,
    context_length: int,
    device: str = "cpu",
    *,
    window: int | None = None,
    ranks: int = 1,
) -> KVCache:
    """A worker's KV, sized by `config.memory_bytes`.

    `layout.page_size` is what counts; it comes from `config.page_size`. `layout` is that of one of
    `ranks` tensor-parallel ranks. Raises `ConfigError` if the budget cannot hold one request of
    `context_length` tokens.
    """
    assert layout.page_size == config.page_size, "layout and configuration differ in page size"
    num_slots = slots_for_budget(config.memory_bytes, layout, config.rows, context_length, ranks)
    cache = assemble_kv_cache(layout, config, num_slots, context_length, device, window=window)
    add_rank_pools(cache, ranks, device)
    return cache


def add_rank_pools(cache: KVCache, ranks: int, device: str = "cpu") -> None:
    """Make the KV of a cache that of `ranks` tensor-parallel ranks.

    Each has a pool of the same layout and slots, for other heads of the same tokens. Raises
    `ConfigError` with a host tier, which knows one pool.
    """
    if ranks > 1 and cache.tier is not None:
        raise ConfigError("cache.host.memory_bytes", f"must be 0: a worker has {ranks} ranks")
    others = (build_kv_pool(cache.layout, cache.num_slots, device) for _ in range(1, ranks))
    cache.rank_pools = (cache.pool, *others)


def assemble_kv_cache(
    layout: PagedLayout,
    config: CacheConfig,
    num_slots: int,
    context_length: int,
    device: str = "cpu",
    *,
    new_copier: Callable[[], Copier] = ThreadCopier,
    window: int | None = None,
) -> KVCache:
    """As `build_kv_cache`, with a given number of usable slots (whole pages).

    `new_copier` makes what moves KV between tiers, if there are several.
    `window`: how many tokens, itself included, a token attends to in every layer of the model;
    None: all. Raises `ConfigError` for a window together with a host tier.
    """
    # Pages are written to the row whole, so a row ends at a page's end.
    width = layout.round_up(context_length)
    pool = build_kv_pool(layout, num_slots, device)
    allocator = _allocator(num_slots, layout.page_size)
    tree: PrefixCache
    if config.host.memory_bytes == 0:
        # A window that no request leaves is none.
        tokens = None if window is None or window >= context_length else window
        tree, tier = _tree(config, AttentionWindow.of(tokens, layout.page_size)), None
    elif window is not None:
        raise ConfigError("cache.host.memory_bytes", "must be 0: the model has a sliding window")
    else:
        pages = HostPool(pool, _host_slots(config, layout), device)
        tree = _tiered_tree(config, pages)
        files = _host_files(config, tree, pages, new_copier)
        tier = HostTier(tree, allocator, pages, new_copier(), config.host, files)
    return KVCache(
        pool,
        ReqToTokenPool(config.rows, width),
        allocator,
        tree,
        tier,
        context_length=context_length,
        auditing=config.audit,
    )


def _host_slots(config: CacheConfig, layout: PagedLayout) -> int:
    """Host slots, in whole pages, that the budget buys."""
    slots = layout.round_down(config.host.memory_bytes // layout.bytes_per_token)
    if slots == 0:
        page_bytes = layout.page_size * layout.bytes_per_token
        raise ConfigError(
            "cache.host.memory_bytes",
            f"is {config.host.memory_bytes}; one page of KV has {page_bytes} bytes",
        )
    return slots


def _tiered_tree(config: CacheConfig, pages: HostPool) -> TieredRadixCache:
    assert config.radix, "a host tier needs an index"
    size = pages.page_size
    host_slots = _allocator(pages.num_slots, size)
    return TieredRadixCache(size, event_block_tokens(size), config.eviction, host_slots)


def _host_files(
    config: CacheConfig,
    tree: TieredRadixCache,
    pages: HostPool,
    new_copier: Callable[[], Copier],
) -> HostFiles | None:
    directory, bytes_max = config.host.files.directory, config.host.files.bytes_max
    if not directory:
        return None
    files = FileTier(Path(directory), pages.page_hash, pages.page_bytes, bytes_max)
    return HostFiles(tree, pages, files, new_copier())


def _allocator(num_slots: int, page_size: int) -> SlotAllocator:
    if page_size == 1:
        return TokenToKVPoolAllocator(num_slots)
    return PagedTokenToKVPoolAllocator(num_slots, page_size)


def _tree(config: CacheConfig, window: AttentionWindow) -> PrefixCache:
    page_size = window.page_size
    if not config.radix:
        return ChunkCache(window)
    if window.tokens is not None:
        return WindowRadixCache(page_size, event_block_tokens(page_size), window, config.eviction)
    return RadixCache(page_size, event_block_tokens(page_size), config.eviction)
