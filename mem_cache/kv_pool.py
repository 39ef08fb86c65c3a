"""The K/V bytes of a worker, and how many slots a memory budget buys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvferry.config import DType
from kvferry.errors import ConfigError

if TYPE_CHECKING:
    from kvferry.ids import SlotIndices
    from mem_cache.layout import KvLayout

_ROW_ENTRY_BYTES = 4

_TORCH_DTYPES = {
    DType.FLOAT32: torch.float32,
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
}


class MHATokenToKVPool:
    """K and V of multi-head or grouped-query attention, layout NHD.

    `buffer` is `[L, 2, N_slot, H_kv, D]`: `buffer[l, 0]` is K of layer l and `buffer[l, 1]` its V,
    each contiguous. `N_slot = num_slots + page_size`: page 0 takes the writes of padded tokens.
    Slots are chosen by others; this object knows nothing of owners.
    """

    def __init__(self, layout: KvLayout, num_slots: int, device: str = "cpu") -> None:
        assert num_slots % layout.page_size == 0, f"{num_slots} slots are not whole pages"
        self.layout = layout
        self.num_slots = num_slots
        self.dtype = _TORCH_DTYPES[layout.dtype]
        physical = num_slots + layout.page_size
        shape = (layout.num_layers, 2, physical, layout.num_kv_heads, layout.head_dim)
        self.buffer: torch.Tensor = torch.zeros(shape, dtype=self.dtype, device=device)

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(K, V) of one layer, each `[N_slot, H_kv, D]`, views of the pool."""
        return self.buffer[layer, 0], self.buffer[layer, 1]

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put K and V `[T, H_kv, D]` of one layer into `slots` (int64 `[T]`)."""
        self.buffer[layer, 0].index_copy_(0, slots, k)
        self.buffer[layer, 1].index_copy_(0, slots, v)

    def payload_bytes(self, num_tokens: int, layer_start: int, layer_stop: int) -> int:
        """Bytes that `gather` writes and `scatter` reads for this many tokens and layers."""
        per_layer = self.layout.bytes_per_token // self.layout.num_layers
        return per_layer * num_tokens * (layer_stop - layer_start)

    def gather(
        self, slots: SlotIndices, layer_start: int, layer_stop: int, out: torch.Tensor
    ) -> int:
        """Copy layers `[layer_start, layer_stop)` of `slots` to the head of `out` (uint8, 1-D).

        The payload is `[layers, 2, len(slots), H_kv, D]` in the pool's dtype. Returns its bytes.
        One array operation: rows of all layers are picked from the flattened pool, which copies
        twice as fast as selecting along the slot dimension.
        """
        layout = self.layout
        used = self.payload_bytes(len(slots), layer_start, layer_stop)
        assert used <= out.numel(), f"a payload of {used} bytes exceeds {out.numel()}"
        planes = 2 * (layer_stop - layer_start)
        physical = self.buffer.shape[2]
        row = layout.num_kv_heads * layout.head_dim
        source = self.buffer[layer_start:layer_stop].view(planes * physical, row)
        first = torch.arange(planes, device=self.buffer.device)[:, None] * physical
        index = (first + self._index(slots)).view(-1)
        torch.index_select(
            source, 0, index, out=out[:used].view(self.dtype).view(planes * len(slots), row)
        )
        return used

    def scatter(
        self, slots: SlotIndices, layer_start: int, layer_stop: int, payload: torch.Tensor
    ) -> None:
        """Copy a payload made by `gather` (uint8, 1-D) into `slots`, in one array operation."""
        layout = self.layout
        used = self.payload_bytes(len(slots), layer_start, layer_stop)
        assert used <= payload.numel(), f"a payload of {payload.numel()} bytes lacks {used}"
        layers = layer_stop - layer_start
        shape = (layers, 2, len(slots), layout.num_kv_heads, layout.head_dim)
        self.buffer[layer_start:layer_stop].index_copy_(
            2, self._index(slots), payload[:used].view(self.dtype).view(shape)
        )

    def _index(self, slots: SlotIndices) -> torch.Tensor:
        return torch.from_numpy(slots).to(self.buffer.device)


def slots_for_budget(memory_bytes: int, layout: KvLayout, rows: int, context_length: int) -> int:
    """Usable slots, in whole pages, that fit a budget with the row table and dummy page 0.

    Raises `ConfigError` naming `cache.memory_bytes` if not even one request of `context_length`
    tokens would fit: it could be admitted but never finish.
    """
    width = layout.round_up(context_length)
    row_table = _ROW_ENTRY_BYTES * (rows + 1) * width
    fixed = row_table + layout.page_size * layout.bytes_per_token
    slots = layout.round_down(max(0, memory_bytes - fixed) // layout.bytes_per_token)
    if slots < width:
        needed = fixed + width * layout.bytes_per_token
        raise ConfigError(
            "cache.memory_bytes",
            f"is {memory_bytes}; a request of {context_length} tokens (model.context_length) and "
            f"the table of {rows} rows need {needed}",
        )
    return slots
