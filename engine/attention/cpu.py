"""Attention on a CPU: decoded tokens by native kernels, prompt chunks tile by tile.

float32 K/V in the order of the kernels is read where it lies by decoded tokens: no context is
copied. Of any other pool the contexts of some sequences at a time are copied as float32, then go
to the same kernel. A chunk copies one tile of keys and values at a time, for all its queries.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.attention.cpu_kernels import LOWEST, decode_attention, weigh_tile

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engine.attention.metadata import AttentionMetadata
    from mem_cache.kv_pool import KvPool

KEY_TILE = 512
"""Keys gathered at once per chunk: what is copied is bounded by this, whatever the context."""
QUERY_TILE = 256
"""Query tokens whose scores exist at once."""
DECODE_QUERIES_MAX = 4
"""Sequences with at most this many new tokens go to the native kernel, which takes the queries one
by one; for longer chunks matrix products are faster than reading in place."""
COPIED_TOKENS = 4096
"""Tokens copied at once for decoding where K/V is not float32 in place; a longer context alone."""


class CpuAttention:
    """Implements `AttentionBackend` over a pool of K and V of any element type and arrangement."""

    def __init__(self, kv_pool: KvPool, threads: int) -> None:
        self._kv_pool = kv_pool
        self._threads = threads

    def plan(self, metadata: AttentionMetadata) -> CpuAttentionPlan:
        """See `AttentionBackend.plan`."""
        return CpuAttentionPlan(metadata, self._kv_pool, self._threads)


class CpuAttentionPlan:
    """Implements `AttentionPlan`: groups of short sequences for the native kernel, and chunks."""

    def __init__(self, metadata: AttentionMetadata, kv_pool: KvPool, threads: int) -> None:
        self._kv_pool = kv_pool
        self._threads = threads
        short = metadata.query_lengths <= DECODE_QUERIES_MAX
        sequences = np.flatnonzero(short)
        self._groups: list[_PagesInPlace | _CopiedContexts]
        if kv_pool.in_place_dtype == torch.float32:
            self._groups = [_PagesInPlace(metadata, sequences)] if len(sequences) else []
        else:
            self._groups = _copied_groups(metadata, sequences)
        self._chunks = [_Chunk(metadata, int(index)) for index in np.flatnonzero(~short)]

    def run(self, queries: torch.Tensor, layer: int) -> torch.Tensor:
        """See `AttentionPlan.run`."""
        wide = queries.float()
        out = torch.empty_like(wide)
        for group in self._groups:
            group.attend(wide, out, self._kv_pool, layer, self._threads)
        for chunk in self._chunks:
            rows = slice(chunk.first_token, chunk.first_token + chunk.count)
            out[rows] = chunk.attend(wide[rows], self._kv_pool, layer)
        return out.view(len(queries), -1).to(queries.dtype)


class _PagesInPlace:
    """New tokens whose contexts the kernel reads through the page table."""

    def __init__(self, metadata: AttentionMetadata, sequences: NDArray[np.int64]) -> None:
        self._metadata = metadata
        self._rows = _decode_rows(metadata, sequences, metadata.kv_indptr[sequences])

    def attend(
        self, queries: torch.Tensor, out: torch.Tensor, kv_pool: KvPool, layer: int, threads: int
    ) -> None:
        """queries [T, H, D] -> the rows of these tokens in out [T, H, D]."""
        keys, values = kv_pool.layer(layer)
        decode_attention(
            queries.numpy(),
            keys.numpy(),
            values.numpy(),
            out.numpy(),
            self._rows,
            self._metadata.kv_indices,
            self._metadata.page_size,
            threads,
        )


class _CopiedContexts:
    """New tokens whose contexts are copied as float32, one behind the other: pages of one token."""

    def __init__(self, metadata: AttentionMetadata, sequences: NDArray[np.int64]) -> None:
        lengths = metadata.kv_lengths[sequences].astype(np.int64)
        self._rows = _decode_rows(metadata, sequences, np.cumsum(lengths) - lengths)
        self._pages = np.arange(int(lengths.sum()), dtype=np.int32)
        self._slots = torch.cat([_slots(metadata, int(index)) for index in sequences])

    def attend(
        self, queries: torch.Tensor, out: torch.Tensor, kv_pool: KvPool, layer: int, threads: int
    ) -> None:
        """queries [T, H, D] -> the rows of these tokens in out [T, H, D]."""
        keys, values = kv_pool.read(layer, self._slots)
        decode_attention(
            queries.numpy(),
            keys.numpy(),
            values.numpy(),
            out.numpy(),
            self._rows,
            self._pages,
            1,
            threads,
        )


def _copied_groups(
    metadata: AttentionMetadata, sequences: NDArray[np.int64]
) -> list[_PagesInPlace | _CopiedContexts]:
    """Consecutive sequences of together at most `COPIED_TOKENS` tokens, or a longer one alone."""
    groups: list[list[int]] = []
    held = COPIED_TOKENS
    for sequence in sequences.tolist():
        length = int(metadata.kv_lengths[sequence])
        if held + length > COPIED_TOKENS:
            groups.append([])
            held = 0
        groups[-1].append(sequence)
        held += length
    return [_CopiedContexts(metadata, np.asarray(group, dtype=np.int64)) for group in groups]


def _decode_rows(
    metadata: AttentionMetadata, sequences: NDArray[np.int64], first_pages: NDArray[np.integer]
) -> NDArray[np.int64]:
    """`rows` of `decode_attention`: one per new token of these sequences."""
    counts = metadata.query_lengths[sequences].astype(np.int64)
    starts = np.cumsum(counts) - counts
    within = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(starts, counts)
    before = metadata.kv_lengths[sequences].astype(np.int64) - counts
    rows = np.empty((len(within), 3), dtype=np.int64)
    rows[:, 0] = np.repeat(metadata.qo_indptr[sequences], counts) + within
    rows[:, 1] = np.repeat(first_pages, counts)
    rows[:, 2] = np.repeat(before, counts) + within + 1
    return rows


def _slots(metadata: AttentionMetadata, sequence: int) -> torch.Tensor:
    """int64 [length]: the slots of a sequence in logical order."""
    length = int(metadata.kv_lengths[sequence])
    first, last = metadata.kv_indptr[sequence : sequence + 2]
    pages = metadata.kv_indices[first:last].astype(np.int64)
    within = np.arange(metadata.page_size, dtype=np.int64)
    return torch.from_numpy((pages[:, None] * metadata.page_size + within).reshape(-1)[:length])


class _Chunk:
    """Several new tokens of one sequence."""

    def __init__(self, metadata: AttentionMetadata, sequence: int) -> None:
        self.first_token = int(metadata.qo_indptr[sequence])
        self.count = int(metadata.query_lengths[sequence])
        self._prefix_len = int(metadata.kv_lengths[sequence]) - self.count
        self._slots = _slots(metadata, sequence)

    def attend(self, queries: torch.Tensor, kv_pool: KvPool, layer: int) -> torch.Tensor:
        """queries [n, H, D] of this chunk -> [n, H, D], float32."""
        kv_heads = kv_pool.layout.heads
        tiles = [
            _QueryTile(part, self._prefix_len + start, kv_heads)
            for start, part in _split(queries, QUERY_TILE)
        ]
        for start, slots in _split(self._slots, KEY_TILE):
            keys, values = kv_pool.read(layer, slots)
            # [H_kv, D, m] and [H_kv, m, D].
            tile_keys = keys.permute(1, 2, 0).contiguous()
            tile_values = values.transpose(0, 1).contiguous()
            for tile in tiles:
                tile.add(start, tile_keys, tile_values)
        return torch.cat([tile.result() for tile in tiles])


class _QueryTile:
    """A running softmax over key tiles (Milakov and Gimelshein, arXiv:1805.02867).

    The query heads of a KV head are rows of one matrix, so that KV heads are never expanded.
    """

    def __init__(self, queries: torch.Tensor, first_position: int, kv_heads: int) -> None:
        self._count, heads, head_dim = queries.shape
        self._first_position = first_position
        self._group = heads // kv_heads
        grouped = queries.view(self._count, kv_heads, self._group, head_dim)
        rows = grouped.permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
        self._queries = rows / math.sqrt(head_dim)
        self._highest = rows.new_full(rows.shape[:2], float(LOWEST))
        self._weight_sum = rows.new_zeros(rows.shape[:2])
        self._sums = torch.zeros_like(rows)

    def add(self, first_key: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take in keys [H_kv, D, m] and values [H_kv, m, D] of positions from `first_key` on."""
        visible = self._first_position + self._count - first_key
        if visible <= 0:
            return
        scores = torch.bmm(self._queries, keys[:, :, :visible])
        weigh_tile(
            scores.numpy(),
            self._highest.numpy(),
            self._weight_sum.numpy(),
            self._sums.numpy(),
            self._first_position,
            self._count,
            first_key,
        )
        self._sums.baddbmm_(scores, values[:, :visible])

    def result(self) -> torch.Tensor:
        """[n, H, D]."""
        kv_heads, _, head_dim = self._sums.shape
        averaged = (self._sums / self._weight_sum[:, :, None]).view(
            kv_heads, self._group, -1, head_dim
        )
        return averaged.permute(2, 0, 1, 3).reshape(self._count, -1, head_dim)


def _split(tensor: torch.Tensor, size: int) -> list[tuple[int, torch.Tensor]]:
    """(start, rows) of consecutive parts of at most `size` rows."""
    return [(start, tensor[start : start + size]) for start in range(0, len(tensor), size)]
