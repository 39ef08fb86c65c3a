import subprocess
import sys

import numpy as np
import pytest
import torch

from kvferry.config import CacheConfig, HostTierConfig
from kvferry.errors import ConfigError
from mem_cache.chunk_cache import ChunkCache
from mem_cache.factory import add_rank_pools, build_kv_cache
from mem_cache.radix_cache import RadixCache
from mem_cache.slot_allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from mem_cache.tiered_radix_cache import TieredRadixCache
from tests.support.kv_caches import PAGE_SIZES, tiny_layout


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("radix", [True, False])
def test_chooses_by_page_size_and_radix(page_size, radix):
    layout = tiny_layout(page_size)
    config = CacheConfig(page_size=page_size, memory_bytes=100_000, rows=5, radix=radix)
    cache = build_kv_cache(layout, config, context_length=100)
    paged = PagedTokenToKVPoolAllocator
    assert isinstance(cache.allocator, TokenToKVPoolAllocator if page_size == 1 else paged)
    assert isinstance(cache.tree, RadixCache if radix else ChunkCache)
    assert (cache.rows.num_rows, cache.context_length, cache.page_size) == (5, 100, page_size)
    assert cache.num_slots == cache.pool.num_slots == cache.accounts().free
    held = cache.pool.buffer.nbytes + cache.rows.req_to_token.nbytes
    assert 100_000 - page_size * layout.bytes_per_token < held <= 100_000


def test_budget_too_small():
    config = CacheConfig(page_size=4, memory_bytes=1000, rows=5)
    with pytest.raises(ConfigError, match=r"cache\.memory_bytes"):
        build_kv_cache(tiny_layout(4), config, context_length=100)


def test_layout_and_configuration_agree_on_the_page():
    with pytest.raises(AssertionError, match="page size"):
        build_kv_cache(tiny_layout(4), CacheConfig(page_size=16), context_length=100)


def test_only_bytes_and_rows_need_torch():
    modules = "radix_cache", "chunk_cache", "slot_allocator", "ledger", "kv_cache", "layout"
    imports = ", ".join(f"mem_cache.{module}" for module in modules)
    code = f"import sys, {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_host_tier_is_as_large_as_its_budget(page_size):
    layout = tiny_layout(page_size)
    page_bytes = page_size * layout.bytes_per_token
    host = HostTierConfig(memory_bytes=9 * page_bytes + page_bytes // 2)
    config = CacheConfig(page_size=page_size, memory_bytes=100_000, rows=5, host=host)
    cache = build_kv_cache(layout, config, context_length=100)
    accounts = cache.host_accounts()
    assert accounts is not None
    assert accounts.free == accounts.total == 9 * page_size
    assert isinstance(cache.tree, TieredRadixCache)
    cache.close()


def test_host_budget_too_small():
    host = HostTierConfig(memory_bytes=100)
    with pytest.raises(ConfigError, match=r"cache\.host\.memory_bytes.*is 100; one page"):
        build_kv_cache(tiny_layout(4), CacheConfig(page_size=4, host=host), context_length=100)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_the_budget_and_the_slots(ranks):
    layout = tiny_layout(4)
    config = CacheConfig(page_size=4, memory_bytes=300_000, rows=5)
    cache = build_kv_cache(layout, config, context_length=100, ranks=ranks)
    assert len(cache.rank_pools) == ranks
    assert cache.rank_pools[0] is cache.pool
    assert {pool.num_slots for pool in cache.rank_pools} == {cache.num_slots}
    held = sum(pool.buffer.nbytes for pool in cache.rank_pools)
    held += cache.rows.req_to_token.nbytes
    assert 300_000 - 4 * ranks * layout.bytes_per_token < held <= 300_000


def test_a_fork_copies_the_heads_of_every_rank():
    layout = tiny_layout(4)
    config = CacheConfig(page_size=4, memory_bytes=300_000, rows=5, audit=True)
    cache = build_kv_cache(layout, config, context_length=100, ranks=2)
    prompt = np.arange(6, dtype=np.int32)
    kv = cache.open("r", prompt, "")
    cache.extend(kv, 6)
    for pool in cache.rank_pools:
        pool.buffer.uniform_()
    cache.commit(kv, 6)
    cache.checkpoint(kv, prompt)
    twin = cache.fork(kv, "twin")
    for pool in cache.rank_pools:
        payloads = [torch.empty(6 * layout.bytes_per_token, dtype=torch.uint8) for _ in range(2)]
        for request, payload in zip((kv, twin), payloads, strict=True):
            pool.gather(cache.slots(request, 0, 6), layout.whole, payload)
        assert torch.equal(*payloads)
    for request in (kv, twin):
        cache.release(request, None)


def test_a_host_tier_knows_one_rank():
    host = HostTierConfig(memory_bytes=100_000)
    config = CacheConfig(page_size=4, memory_bytes=100_000, rows=5, host=host)
    cache = build_kv_cache(tiny_layout(4), config, context_length=100)
    with pytest.raises(ConfigError, match=r"cache\.host\.memory_bytes.*2 ranks"):
        add_rank_pools(cache, 2)
    cache.close()
