"""A whole cluster in one process whose workers run the digest model: all real but the arithmetic.

Tokens come as fast as gRPC, links and scheduler let them, so that pressure is cheap to make.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from unittest.mock import patch

from kvferry.config import CacheConfig, ClusterConfig, ModelConfig, SchedulerConfig
from kvferry.membership import Role
from mem_cache.kv_pool import slots_for_budget
from tests.support.digest_model import EOS, VOCAB, DigestRunner, digest_layout
from tests.support.in_process_cluster import InProcessCluster

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kvferry.config import DType
    from mem_cache.kv_pool import KvPool

ROWS = 24


@dataclass(frozen=True, slots=True)
class _ModelOfDigest:
    """What a worker reads of a model's description."""

    vocab_size: int = VOCAB
    eos_token_ids: tuple[int, ...] = (EOS,)
    num_layers: int = 1
    num_kv_heads: int = 1
    head_dim: int = 2
    context_length: int = 8192


class _WorkerRunner(DigestRunner):
    """The digest model, made as a worker makes its model."""

    def __init__(self, directory: Path, kv_pool: KvPool, *, threads: int, dtype: DType) -> None:
        super().__init__(kv_pool, kv_pool.layout.page_size)

    def warm_up(self) -> None:
        """Nothing to load."""


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
def digest_cluster(
    config: ClusterConfig, roles: Sequence[Role] = (Role.PREFILL, Role.DECODE)
) -> Iterator[InProcessCluster]:
    """A running cluster of these workers."""
    with (
        patch("cluster.worker_process.load_spec", lambda directory: _ModelOfDigest()),
        patch("cluster.worker_process.ModelRunner", _WorkerRunner),
        InProcessCluster(config, roles) as cluster,
    ):
        yield cluster
