"""Small KV caches for tests, and the stamps that show whose K/V a slot holds."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvferry.config import (
    CacheConfig,
    EvictionPolicy,
    FileTierConfig,
    HostTierConfig,
    KvDType,
    WritePolicy,
)
from kvferry.ids import ExtraKey
from mem_cache.factory import assemble_kv_cache
from mem_cache.layout import KvLayout

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from numpy.typing import NDArray

    from kvferry.ids import TokenIds
    from mem_cache.copier import Copier
    from mem_cache.kv_cache import KVCache
    from mem_cache.request_kv import RequestKV

PAGE_SIZES = (1, 4, 16, 64)
SHARED = ExtraKey("")


def tiny_layout(page_size: int, dtype: KvDType = KvDType.FLOAT32) -> KvLayout:
    """Two layers, one KV head of two elements."""
    return KvLayout(num_layers=2, num_kv_heads=1, head_dim=2, dtype=dtype, page_size=page_size)


def tiny_cache(
    page_size: int,
    *,
    pages: int = 64,
    rows: int = 8,
    radix: bool = True,
    context_length: int = 1024,
    window: int | None = None,
    auditing: bool = True,
) -> KVCache:
    """A KV cache of `pages` usable pages that audits itself after every change."""
    config = CacheConfig(page_size=page_size, rows=rows, radix=radix, audit=auditing)
    return assemble_kv_cache(
        tiny_layout(page_size), config, pages * page_size, context_length, window=window
    )


def tiered_cache(
    page_size: int,
    copier: Copier,
    *,
    pages: int = 8,
    host_pages: int = 32,
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH,
    eviction: EvictionPolicy = EvictionPolicy.LRU,
    auditing: bool = True,
    files: tuple[Path, Copier] | None = None,
    files_bytes_max: int = 2**32,
) -> KVCache:
    """A KV cache with a host tier; even one page is worth loading back.

    `files` adds a file tier: its directory, and what copies to and from it.
    """
    layout = tiny_layout(page_size)
    host = HostTierConfig(
        memory_bytes=host_pages * page_size * layout.bytes_per_token,
        write_policy=write_policy,
        load_back_tokens_min=1,
        files=FileTierConfig("" if files is None else str(files[0]), files_bytes_max),
    )
    config = CacheConfig(page_size=page_size, rows=8, eviction=eviction, host=host, audit=auditing)
    copiers = iter([copier] if files is None else [files[1], copier])
    return assemble_kv_cache(
        layout,
        config,
        pages * page_size,
        context_length=1024,
        new_copier=lambda: next(copiers),
    )


def tokens_of(ids: Iterable[int]) -> TokenIds:
    """Token ids as the array the product uses."""
    return np.fromiter(ids, dtype=np.int32)


def stamps(token_ids: TokenIds, seed: str) -> NDArray[np.float32]:
    """[n, 2] values that stand for the K/V of each token: they depend on every token up to it.

    Two numbers of 24 bits, which float32 holds exactly.
    """
    values = np.empty((len(token_ids), 2), dtype=np.float32)
    state = zlib.crc32(seed.encode())
    for position, token in enumerate(token_ids.tolist()):
        state = zlib.crc32(token.to_bytes(4, "little"), state)
        values[position] = (state & 0xFFFFFF, state >> 8)
    return values


def write_stamps(cache: KVCache, slots: NDArray[np.int64], values: NDArray[np.float32]) -> None:
    """Put the values into K of every layer, and their negatives into V."""
    key = torch.from_numpy(values)[:, None, :]
    for layer in range(cache.layout.num_layers):
        cache.pool.write(layer, torch.from_numpy(slots), key, -key)


def read_stamps(cache: KVCache, slots: NDArray[np.int64]) -> NDArray[np.float32]:
    """[layers, 2, n, 2] what the pool holds in these slots."""
    picked = cache.pool.buffer[:, :, torch.from_numpy(slots), 0, :]
    return np.asarray(picked.numpy())


def compute(cache: KVCache, kv: RequestKV, token_ids: TokenIds, up_to: int) -> None:
    """Extend a request to `up_to` tokens, write their stamps and commit them."""
    start = kv.committed_len
    slots = cache.extend(kv, up_to)
    write_stamps(cache, slots, stamps(token_ids[:up_to], kv.extra_key)[start:])
    cache.commit(kv, up_to)


def assert_reads_its_tokens(cache: KVCache, kv: RequestKV, token_ids: TokenIds) -> None:
    """Whoever reads the row now sees the K/V of exactly these tokens."""
    expected = stamps(token_ids[: kv.committed_len], kv.extra_key)
    seen = read_stamps(cache, cache.slots(kv, 0, kv.committed_len))
    for layer in seen:
        np.testing.assert_array_equal(layer[0], expected)
        np.testing.assert_array_equal(layer[1], -expected)
