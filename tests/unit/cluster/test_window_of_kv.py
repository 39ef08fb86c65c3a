from dataclasses import replace

import pytest

from cluster.worker_process import window_of_kv
from kvferry.config import (
    CacheConfig,
    ClusterConfig,
    HostTierConfig,
    WorkerGroupConfig,
    WorkersConfig,
)

NONE, TWO = WorkerGroupConfig(count=0), WorkerGroupConfig(count=2)
ALONE = ClusterConfig(workers=WorkersConfig(prefill=NONE, decode=NONE, both=TWO))
WITH_HOST = CacheConfig(host=HostTierConfig(memory_bytes=2**30))


def test_a_worker_that_only_serves_itself_keeps_the_window():
    assert window_of_kv(4096, ALONE) == 4096
    assert window_of_kv(None, ALONE) is None


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_handoffs_take_whole_sequences(role):
    workers = replace(ALONE.workers, **{role: WorkerGroupConfig(count=1)})
    assert window_of_kv(4096, replace(ALONE, workers=workers)) is None


def test_a_host_tier_takes_whole_sequences():
    assert window_of_kv(4096, replace(ALONE, cache=WITH_HOST)) is None
