"""Rows, pages and pools for tests of the model side: sequences on shuffled pages."""

from __future__ import annotations

import numpy as np
import torch

from kvferry.config import DType
from mem_cache.kv_pool import MHATokenToKVPool
from mem_cache.layout import KvLayout
from mem_cache.req_to_token_pool import ReqToTokenPool


def make_pool(
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    num_slots: int = 1024,
    dtype: DType = DType.FLOAT32,
) -> MHATokenToKVPool:
    """A pool full of NaN: whoever reads a slot that nobody wrote will know."""
    layout = KvLayout(num_layers, num_kv_heads, head_dim, dtype, page_size)
    pool = MHATokenToKVPool(layout, num_slots)
    pool.buffer.fill_(torch.nan)
    return pool


def make_rows(
    page_size: int, count: int, *, num_slots: int = 1024, seed: int = 0
) -> ReqToTokenPool:
    """Rows 1..count, each full of pages of its own that lie in no order."""
    num_pages = num_slots // page_size
    pages = np.random.default_rng(seed).permutation(num_pages) + 1
    each = num_pages // count
    rows = ReqToTokenPool(count, each * page_size)
    for row in range(1, count + 1):
        mine = pages[(row - 1) * each : row * each]
        slots = mine[:, None] * page_size + np.arange(page_size)
        rows.write(row, 0, slots.reshape(-1).astype(np.int64))
    return rows
