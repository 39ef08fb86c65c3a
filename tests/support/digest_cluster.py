"""A whole cluster in one process whose workers run the digest model: all real but the arithmetic.

Tokens come as fast as gRPC, links and scheduler let them, so that pressure is cheap to make.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING
from unittest.mock import patch

from engine.model_spec import load_spec
from kvferry.config import CacheConfig, ClusterConfig, ModelConfig, SchedulerConfig
from kvferry.membership import Role
from mem_cache.kv_pool import slots_for_budget
from tests.support.digest_model import DigestRunner, digest_layout
from tests.support.in_process_cluster import InProcessCluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from engine.model_spec import ModelSpec
    from kvferry.membership import WorkerInfo
    from mem_cache.kv_pool import KvPool
    from router.worker_client import WorkerClient

ROWS = 24


def _digest_spec(directory: Path) -> ModelSpec:
    """The model's description, with K and V of the digest model."""
    return replace(load_spec(directory), num_layers=1, num_kv_heads=1, head_dim=2)


class _WorkerRunner(DigestRunner):
    """The digest model, made as a worker makes its model."""

    def __init__(self, directory: Path, kv_pool: KvPool, **how: object) -> None:
        """`how`: what the model is computed with."""
        super().__init__(kv_pool, kv_pool.layout.page_size)

    def warm_up(self) -> None:
        """Nothing to load."""

    def close(self) -> None:
        """No other ranks."""


def digest_config(
    page_size: int, num_slots: int, *, radix: bool = True, scheduler: SchedulerConfig
) -> ClusterConfig:
    """Workers with `num_slots` slots each, which hold one request of the longest context."""
    layout = digest_layout(page_size)
    fixed = 4 * (ROWS + 1) * num_slots + page_size * layout.bytes_per_token
    memory_bytes = fixed + num_slots * layout.bytes_per_token
    assert slots_for_budget(memory_bytes, layout, ROWS, num_slots) == num_slots
    return ClusterConfig(
        model=ModelConfig(context_length=num_slots),
        cache=CacheConfig(
            page_size=page_size, memory_bytes=memory_bytes, rows=ROWS, radix=radix, audit=True
        ),
        scheduler=scheduler,
    )


@contextmanager
def digest_workers() -> Iterator[None]:
    """Workers that start meanwhile run the digest model."""
    with (
        patch("cluster.worker_process.load_spec", _digest_spec),
        patch("cluster.worker_process.ModelRunner", _WorkerRunner),
    ):
        yield


@contextmanager
def digest_cluster(
    config: ClusterConfig,
    roles: Sequence[Role] = (Role.PREFILL, Role.DECODE),
    connect: Callable[[WorkerInfo], WorkerClient] | None = None,
) -> Iterator[InProcessCluster]:
    """A running cluster of these workers; `connect` as of `InProcessCluster`."""
    with digest_workers(), InProcessCluster(config, roles, connect) as cluster:
        yield cluster
