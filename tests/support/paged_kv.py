"""Rows, pages and pools for tests of the model side: sequences on shuffled pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from mem_cache.pool_choice import build_kv_pool
from mem_cache.req_to_token_pool import ReqToTokenPool

if TYPE_CHECKING:
    from mem_cache.kv_pool import KvPool
    from mem_cache.layout import PagedLayout


def poisoned_pool(layout: PagedLayout, num_slots: int = 1024) -> KvPool:
    """A pool that reads as NaN: whoever reads a slot that nobody wrote will know.

    All bits set are NaN in every floating type, an int8 pool's scales included.
    """
    pool = build_kv_pool(layout, num_slots)
    pool.buffer.view(torch.uint8).fill_(255)
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
