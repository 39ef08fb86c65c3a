"""The work of `decode_kernel`: cut into items once per step, shared by the crew in each layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine.attention.decode_kernel import COUNTER_WORDS, SPLIT, decode_part, partial_size
from engine.crew import share

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from engine.attention.metadata import AttentionMetadata
    from engine.attention.stored_kv import StoredKv


class DecodeWork:
    """Attention of the new tokens of some sequences of a step."""

    def __init__(
        self,
        metadata: AttentionMetadata,
        sequences: NDArray[np.int64],
        stored: StoredKv,
        board: int,
    ) -> None:
        self._pages = metadata.kv_indices
        self._stored = stored
        self._board = board
        self._items, self._partials_count = _items(metadata, sequences, stored.window)
        self._counters = np.zeros((int(metadata.qo_indptr[-1]), COUNTER_WORDS), dtype=np.int64)
        self._partials = np.empty(0, dtype=np.float32)

    def run(self, queries: torch.Tensor, out: torch.Tensor, layer: int) -> None:
        """Rows of queries into the same of out, [T, H, D] float32, contiguous."""
        stored, heads = self._stored, queries.shape[1]
        size = stored.heads * partial_size(heads // stored.heads, stored.width)
        if len(self._partials) < self._partials_count * size:
            self._partials = np.empty(self._partials_count * size, dtype=np.float32)
        keys, values = stored.addresses(layer)
        arguments = np.array(
            [
                queries.data_ptr(),
                keys,
                values,
                out.data_ptr(),
                self._items.ctypes.data,
                self._pages.ctypes.data,
                self._partials.ctypes.data,
                self._counters.ctypes.data,
                heads,
                *stored.numbers,
            ],
            dtype=np.int64,
        )
        share(self._board, decode_part(stored.form).address, arguments, len(self._items))


def _items(
    metadata: AttentionMetadata, sequences: NDArray[np.int64], window: int
) -> tuple[NDArray[np.int64], int]:
    """Items of `decode_part`, one per split of a sequence, and how many partials they leave."""
    tokens = metadata.query_lengths[sequences].astype(np.int64)
    lengths = metadata.kv_lengths[sequences].astype(np.int64)
    first = np.maximum(lengths - tokens + 1 - window, 0) // SPLIT
    splits = (lengths - 1) // SPLIT + 1 - first
    partials = np.cumsum(splits * tokens)
    of_sequence = np.stack(
        [
            metadata.qo_indptr[sequences].astype(np.int64),
            tokens,
            metadata.kv_indptr[sequences].astype(np.int64),
            lengths - tokens,
            first,
            partials - splits * tokens,
        ],
        axis=1,
    )
    items = np.repeat(of_sequence, splits, axis=0)
    items[:, 4] += np.arange(len(items)) - np.repeat(np.cumsum(splits) - splits, splits)
    return items, int(partials[-1]) if len(partials) else 0
