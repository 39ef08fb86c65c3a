"""Attention on a CPU: decoded tokens by native kernels in place, prompt chunks tile by tile.

Neither copies a context: a decoded token reads its pages where they lie, whatever their element
type and arrangement; a chunk gathers one tile of keys and values at a time, for all its queries.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.attention.coded_kernels import coded_decode_attention, placement
from engine.attention.cpu_kernels import LOWEST, decode_attention, weigh_tile

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engine.attention.metadata import AttentionMetadata
    from engine.crew import Crew
    from mem_cache.kv_pool import KvPool
    from mem_cache.layout import PagedLayout

KEY_TILE = 512
"""Keys gathered at once per chunk: what is copied is bounded by this, whatever the context."""
QUERY_TILE = 256
"""Query tokens whose scores exist at once."""
DECODE_QUERIES_MAX = 4
"""Sequences with at most this many new tokens go to the native kernel, which takes the queries one
by one; for longer chunks matrix products are faster than reading in place."""
_EVERYTHING = 2**62
"""A window that no position leaves."""
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class CpuAttention:
    """Implements `AttentionBackend` over a pool of K and V of any element type and arrangement.

    `window`: how many tokens, itself included, each token attends to; None: all up to itself.
    `score_cap` c: scores x become c tanh(x / c), which no native kernel does: decoded tokens are
    chunks then.
    """

    def __init__(
        self,
        kv_pool: KvPool,
        crew: Crew,
        window: int | None = None,
        score_cap: float | None = None,
    ) -> None:
        self._kv_pool = kv_pool
        self._board = crew.board
        self._window = _EVERYTHING if window is None else window
        self._score_cap = score_cap

    def plan(self, metadata: AttentionMetadata) -> CpuAttentionPlan:
        """See `AttentionBackend.plan`."""
        return CpuAttentionPlan(metadata, self._kv_pool, self._board, self._window, self._score_cap)


class CpuAttentionPlan:
    """Implements `AttentionPlan`: the rows for a native kernel, and the chunks."""

    def __init__(
        self,
        metadata: AttentionMetadata,
        kv_pool: KvPool,
        board: int,
        window: int,
        score_cap: float | None,
    ) -> None:
        self._metadata = metadata
        self._kv_pool = kv_pool
        self._board = board
        short = metadata.query_lengths <= (DECODE_QUERIES_MAX if score_cap is None else 0)
        self._rows = _decode_rows(metadata, np.flatnonzero(short), window)
        self._chunks = [
            _Chunk(metadata, int(index), window, score_cap) for index in np.flatnonzero(~short)
        ]

    def run(self, queries: torch.Tensor, layer: int) -> torch.Tensor:
        """See `AttentionPlan.run`."""
        wide = queries.float()
        out = torch.empty_like(wide)
        if len(self._rows):
            self._decode(wide, out, layer)
        for chunk in self._chunks:
            rows = slice(chunk.first_token, chunk.first_token + chunk.count)
            out[rows] = chunk.attend(wide[rows], self._kv_pool, layer)
        return out.view(len(queries), -1).to(queries.dtype)

    def _decode(self, queries: torch.Tensor, out: torch.Tensor, layer: int) -> None:
        keys, values = self._kv_pool.layer(layer)
        if self._kv_pool.in_place_dtype == torch.float32:
            decode_attention(
                queries.numpy(),
                keys.numpy(),
                values.numpy(),
                out.numpy(),
                self._rows,
                self._metadata.kv_indices,
                self._metadata.page_size,
                self._board,
            )
            return
        layout = self._kv_pool.layout
        coded_decode_attention(
            queries.numpy(),
            _units(keys, layout),
            _units(values, layout),
            out.numpy(),
            self._rows,
            self._metadata.kv_indices,
            placement(layout),
            self._board,
        )


def _units(stored: torch.Tensor, layout: PagedLayout) -> NDArray[Any]:
    """One plane of a layer as unsigned integers of its elements' size, [units, width]."""
    units = stored.view(torch.uint8).view(-1, layout.unit_bytes).numpy()
    return units.view(_UNSIGNED[stored.itemsize])


def _decode_rows(
    metadata: AttentionMetadata, sequences: NDArray[np.int64], window: int
) -> NDArray[np.int64]:
    """`rows` of `decode_attention`: one per new token of these sequences."""
    counts = metadata.query_lengths[sequences].astype(np.int64)
    starts = np.cumsum(counts) - counts
    within = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(starts, counts)
    before = metadata.kv_lengths[sequences].astype(np.int64) - counts
    rows = np.empty((len(within), 4), dtype=np.int64)
    rows[:, 0] = np.repeat(metadata.qo_indptr[sequences], counts) + within
    rows[:, 1] = np.repeat(metadata.kv_indptr[sequences], counts)
    rows[:, 3] = np.repeat(before, counts) + within + 1
    rows[:, 2] = np.maximum(rows[:, 3] - window, 0)
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

    def __init__(
        self, metadata: AttentionMetadata, sequence: int, window: int, score_cap: float | None
    ) -> None:
        self._window = window
        self._score_cap = score_cap
        self.first_token = int(metadata.qo_indptr[sequence])
        self.count = int(metadata.query_lengths[sequence])
        self._prefix_len = int(metadata.kv_lengths[sequence]) - self.count
        self._first_key = max(0, self._prefix_len + 1 - window)
        self._slots = _slots(metadata, sequence)[self._first_key :]

    def attend(self, queries: torch.Tensor, kv_pool: KvPool, layer: int) -> torch.Tensor:
        """queries [n, H, D] of this chunk -> [n, H, D], float32."""
        kv_heads = kv_pool.layout.heads
        tiles = [
            _QueryTile(part, self._prefix_len + start, kv_heads, self._window, self._score_cap)
            for start, part in _split(queries, QUERY_TILE)
        ]
        for start, slots in _split(self._slots, KEY_TILE):
            keys, values = kv_pool.read(layer, slots)
            # [H_kv, D, m] and [H_kv, m, D].
            tile_keys = keys.permute(1, 2, 0).contiguous()
            tile_values = values.transpose(0, 1).contiguous()
            for tile in tiles:
                tile.add(self._first_key + start, tile_keys, tile_values)
        return torch.cat([tile.result() for tile in tiles])


class _QueryTile:
    """A running softmax over key tiles (Milakov and Gimelshein, arXiv:1805.02867).

    The query heads of a KV head are rows of one matrix, so that KV heads are never expanded.
    """

    def __init__(
        self,
        queries: torch.Tensor,
        first_position: int,
        kv_heads: int,
        window: int,
        score_cap: float | None,
    ) -> None:
        self._window = window
        self._score_cap = score_cap
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
        left = self._first_position + 1 - self._window - first_key
        if visible <= 0 or left >= len(values[0]):
            return
        scores = torch.bmm(self._queries, keys[:, :, :visible])
        if self._score_cap is not None:
            scores.div_(self._score_cap).tanh_().mul_(self._score_cap)
        weigh_tile(
            scores.numpy(),
            self._highest.numpy(),
            self._weight_sum.numpy(),
            self._sums.numpy(),
            self._first_position,
            self._count,
            first_key,
            self._window,
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
