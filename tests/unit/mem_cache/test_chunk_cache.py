import numpy as np
import pytest

from mem_cache.attention_window import AttentionWindow
from mem_cache.chunk_cache import ChunkCache
from mem_cache.tree_node import TreeNode
from tests.support.kv_caches import SHARED, tokens_of

EVERYTHING = AttentionWindow.of(None, 4)


def test_takes_nothing_and_finds_nothing():
    cache = ChunkCache(EVERYTHING)
    text = tokens_of(range(8))
    result = cache.insert(text, np.arange(8, dtype=np.int64), SHARED)
    assert (result.matched_len, result.last_node) == (0, cache.root)
    match = cache.match_prefix(text, SHARED)
    assert (match.length, match.last_device_node) == (0, cache.root)
    assert len(cache.path_device_indices(cache.root)) == 0
    assert (cache.evictable_size(), cache.protected_size()) == (0, 0)
    assert len(cache.evict(8)) == len(cache.reset()) == 0
    assert list(cache.nodes()) == []


def test_the_root_is_all_there_is_to_lock():
    cache = ChunkCache(EVERYTHING)
    cache.lock(cache.root)
    cache.unlock(cache.root)
    stranger = TreeNode(1, cache.root, b"\0\0\0\0", np.asarray([1], dtype=np.int64), 0)
    with pytest.raises(AssertionError, match="not of this index"):
        cache.lock(stranger)
    with pytest.raises(AssertionError, match="not of this index"):
        cache.unlock(stranger)


def test_insert_needs_a_slot_per_token():
    with pytest.raises(AssertionError, match="check 2"):
        ChunkCache(EVERYTHING).insert(tokens_of([1]), np.empty(0, dtype=np.int64), SHARED)
