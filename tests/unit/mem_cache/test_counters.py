from __future__ import annotations

from dataclasses import fields

import pytest

from kvferry.config import CacheConfig, FileTierConfig, HostTierConfig
from mem_cache.factory import assemble_kv_cache
from mem_cache.file_tier import FileTierStatistics
from mem_cache.host_tier import TierStatistics
from tests.support.digest_model import digest_layout

HOST = {f"host_tokens_{entry.name}" for entry in fields(TierStatistics)}
FILES = {f"file_tier_{entry.name}" for entry in fields(FileTierStatistics)}


@pytest.mark.parametrize(
    ("host_bytes", "with_files", "names"),
    [(0, False, set()), (2**16, False, HOST), (2**16, True, HOST | FILES)],
)
def test_each_tier_that_is_there_tells_what_it_did(host_bytes, with_files, names, tmp_path):
    files = FileTierConfig(directory=str(tmp_path) if with_files else "")
    config = CacheConfig(
        page_size=4, rows=2, host=HostTierConfig(memory_bytes=host_bytes, files=files)
    )
    cache = assemble_kv_cache(digest_layout(4), config, 64, 64)
    try:
        assert cache.counters.keys() == names
        assert not any(cache.counters.values())
    finally:
        cache.close()
