"""Attention on a CPU, by kernels that read KV where it lies and share their work over a crew.

Neither copies a context: short sequences read their pages in place (`decode_kernel`), chunks decode
one small tile of keys and values at a time (`chunk_kernel`), whatever the element type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.attention.chunks import ChunkWork
from engine.attention.decode import DecodeWork
from engine.attention.stored_kv import StoredKv

if TYPE_CHECKING:
    from engine.attention.metadata import AttentionMetadata
    from engine.crew import Crew
    from mem_cache.kv_pool import KvPool

DECODE_QUERIES_MAX = 4
"""Sequences with at most this many new tokens go to the kernel that reads KV in place; for longer
chunks products of matrices are faster."""


class CpuAttention:
    """Implements `AttentionBackend` over a pool of K and V of any element type and arrangement.

    `window` and `score_cap` as `StoredKv` has them.
    """

    def __init__(
        self,
        kv_pool: KvPool,
        crew: Crew,
        window: int | None = None,
        score_cap: float | None = None,
    ) -> None:
        self._stored = StoredKv(kv_pool, window, score_cap)
        self._board = crew.board

    def plan(self, metadata: AttentionMetadata) -> CpuAttentionPlan:
        """See `AttentionBackend.plan`."""
        return CpuAttentionPlan(metadata, self._stored, self._board)


class CpuAttentionPlan:
    """Implements `AttentionPlan`."""

    def __init__(self, metadata: AttentionMetadata, stored: StoredKv, board: int) -> None:
        short = metadata.query_lengths <= DECODE_QUERIES_MAX
        sequences = np.flatnonzero(short), np.flatnonzero(~short)
        self._works: list[DecodeWork | ChunkWork] = []
        if len(sequences[0]):
            self._works.append(DecodeWork(metadata, sequences[0], stored, board))
        if len(sequences[1]):
            self._works.append(ChunkWork(metadata, sequences[1], stored, board))

    def run(self, queries: torch.Tensor, layer: int) -> torch.Tensor:
        """See `AttentionPlan.run`."""
        wide = queries.float().contiguous()
        out = torch.empty_like(wide)
        for work in self._works:
            work.run(wide, out, layer)
        return out.view(len(queries), -1).to(queries.dtype)
