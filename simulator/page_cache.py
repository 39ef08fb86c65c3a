"""A worker's KV cache without KV: the product's own, with a page for its token.

Rows, allocator, radix tree, eviction and ledger are those of `mem_cache`. What they count in slots
are whole pages here, and what they take for a token id names a page of tokens: so a prompt of
12,800 tokens is 25 ids of pages of 512, and costs what 25 tokens cost. Nothing is lost by that,
because the product too matches, takes, publishes and evicts whole pages only
(`tests/property/test_page_cache.py` compares the two). Copies of KV do not happen: there is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from kvferry.config import EvictionPolicy, KvDType
from mem_cache.kv_cache import KVCache
from mem_cache.layout import KvLayout
from mem_cache.radix_cache import RadixCache
from mem_cache.req_to_token_pool import ReqToTokenPool
from mem_cache.slot_allocator import TokenToKVPoolAllocator
from router.prompt_keys import prompt_keys

if TYPE_CHECKING:
    from mem_cache.kv_pool import KvPool
    from mem_cache.layout import PagedLayout
    from mem_cache.tree_node import TreeNode

_LAYOUT = KvLayout(1, 1, 2, KvDType.FLOAT32, page_size=1)


@dataclass(frozen=True, slots=True)
class _NoBytes:
    """In place of a pool: it holds no KV, and nobody asks for any."""

    layout: PagedLayout = _LAYOUT


class _PageTree(RadixCache):
    """Names blocks by the router's compiled loop, which gives the same hashes."""

    def _hash_blocks(self, leaf: TreeNode, key: bytes) -> bytes:
        ids = np.frombuffer(key, dtype=np.int32)
        return prompt_keys(ids, 1, leaf.extra_key)[leaf.start :].tobytes()


def page_cache(pages: int, rows: int, context_pages: int, policy: EvictionPolicy) -> KVCache:
    """The cache of a worker with `pages` pages of KV, for `rows` requests at a time."""
    return KVCache(
        cast("KvPool", _NoBytes()),
        ReqToTokenPool(rows, context_pages),
        TokenToKVPoolAllocator(pages),
        _PageTree(1, 1, policy),
        None,
        context_length=context_pages,
    )
