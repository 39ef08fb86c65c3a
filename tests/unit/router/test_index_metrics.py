from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest

from kvferry.clock import MonotonicClock
from kvferry.ids import Incarnation, WorkerId
from kvferry.kv_events import BlockHash, BlocksStored, KvEventBatch
from router.api.index_metrics import IndexMetrics
from router.fleet import Fleet

if TYPE_CHECKING:
    from router.prefix_index import PrefixIndex


def _sample(index: PrefixIndex) -> None:
    """Two workers join, one of them tells what it holds."""
    for name in ("a", "b"):
        index.join(WorkerId(name), Incarnation(1))
    held = (BlocksStored((BlockHash(5), BlockHash(6))),)
    index.apply(KvEventBatch(WorkerId("a"), Incarnation(1), 0, True, held))
    index.apply(KvEventBatch(WorkerId("a"), Incarnation(2), 0, True, held))


def test_an_index_that_knows_less_than_all_workers_says_so() -> None:
    fleet = Fleet(clock=MonotonicClock(), block_tokens=16, status_interval_s=1.0)
    _sample(fleet._decode_index)
    registry = CollectorRegistry()
    registry.register(IndexMetrics(fleet))
    lines = generate_latest(registry).decode().splitlines()
    for line in (
        'kvferry_index_workers{pool="decode"} 2.0',
        'kvferry_index_known_workers{pool="decode"} 1.0',
        'kvferry_index_blocks{pool="decode"} 2.0',
        'kvferry_index_blocks{pool="prefill"} 0.0',
        'kvferry_index_batches_total{outcome="snapshots",pool="decode"} 1.0',
        'kvferry_index_batches_total{outcome="stale",pool="decode"} 1.0',
    ):
        assert line in lines
