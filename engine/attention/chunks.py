"""The work of `chunk_kernel`: cut into items once per step, shared by the crew in each layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine.attention.chunk_kernel import chunk_part, tile_tokens
from engine.crew import share

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from engine.attention.metadata import AttentionMetadata
    from engine.attention.stored_kv import StoredKv


class ChunkWork:
    """Attention of the new tokens of some sequences of a step, for sequences of many."""

    def __init__(
        self,
        metadata: AttentionMetadata,
        sequences: NDArray[np.int64],
        stored: StoredKv,
        board: int,
    ) -> None:
        self._metadata = metadata
        self._sequences = sequences
        self._stored = stored
        self._board = board
        self._items = np.empty((0, 0), dtype=np.int64)

    def run(self, queries: torch.Tensor, out: torch.Tensor, layer: int) -> None:
        """Rows of queries into the same of out, [T, H, D] float32, contiguous."""
        stored, heads = self._stored, queries.shape[1]
        if not len(self._items):
            self._items = self._cut(heads // stored.heads)
        pages = self._metadata.kv_indices
        keys, values = stored.addresses(layer)
        arguments = np.array(
            [
                queries.data_ptr(),
                keys,
                values,
                out.data_ptr(),
                self._items.ctypes.data,
                pages.ctypes.data,
                heads,
                *stored.numbers,
            ],
            dtype=np.int64,
        )
        share(self._board, chunk_part(stored.form).address, arguments, len(self._items))

    def _cut(self, group: int) -> NDArray[np.int64]:
        """Items of `chunk_part`; those that see most keys first, so that threads end together."""
        metadata = self._metadata
        items = []
        for sequence in self._sequences.tolist():
            count = int(metadata.query_lengths[sequence])
            tokens_max = tile_tokens(group, count)
            row, first_page = int(metadata.qo_indptr[sequence]), int(metadata.kv_indptr[sequence])
            position = int(metadata.kv_lengths[sequence]) - count
            items += [
                (row + start, min(tokens_max, count - start), first_page, position + start, head)
                for start in range(0, count, tokens_max)
                for head in range(self._stored.heads)
            ]
        items.sort(key=lambda item: -item[3])
        return np.array(items, dtype=np.int64)
