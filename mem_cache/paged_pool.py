"""The stored bytes of a worker's KV, for any layout: one buffer, addressed by slot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from kvferry.config import KvArrangement
from mem_cache.element_codec import codec_of
from mem_cache.layout import PagedLayout

if TYPE_CHECKING:
    from kvferry.ids import SlotIndices

LayoutT = TypeVar("LayoutT", bound=PagedLayout)

_WORDS = (torch.complex128, torch.float64, torch.int32, torch.int16, torch.uint8)
"""What bytes are moved as, the widest that fits: scattering costs per element, not per byte."""


class PagedPool(Generic[LayoutT]):
    """What the pools of all layouts share: the buffer, and moving tokens out of it and into it.

    `buffer`, in the stored element type, is `[L, planes, N_slot, heads, width]` (NHD) or
    `[L, planes, N_page, heads, page_size, width]` (HND). `N_slot = num_slots + page_size`: page 0
    takes the writes of padded tokens. Slots are chosen by others; a pool knows nothing of owners.

    A *run* is what is contiguous of a token: all heads of a plane (NHD), or one (HND).
    """

    def __init__(self, layout: LayoutT, num_slots: int, device: str = "cpu") -> None:
        assert num_slots % layout.page_size == 0, f"{num_slots} slots are not whole pages"
        self.layout = layout
        self.num_slots = num_slots
        self._codec = codec_of(layout.dtype)
        self._by_head = layout.order is KvArrangement.HND
        physical = num_slots + layout.page_size
        width = layout.unit_bytes // self._codec.storage.itemsize
        place = (
            (physical // layout.page_size, layout.heads, layout.page_size)
            if self._by_head
            else (physical, layout.heads)
        )
        shape = (layout.num_layers, layout.planes, *place, width)
        self.buffer: torch.Tensor = torch.zeros(shape, dtype=self._codec.storage, device=device)
        run_bytes = layout.unit_bytes * (1 if self._by_head else layout.heads)
        self._word = next(word for word in _WORDS if run_bytes % word.itemsize == 0)
        words = self.buffer.view(-1).view(self._word)
        self._runs = words.view(layout.num_layers, layout.planes, -1, run_bytes // words.itemsize)

    def payload_bytes(self, num_tokens: int, layer_start: int, layer_stop: int) -> int:
        """See `KvPool.payload_bytes`."""
        per_layer = self.layout.bytes_per_token // self.layout.num_layers
        return per_layer * num_tokens * (layer_stop - layer_start)

    def gather(
        self, slots: SlotIndices, layer_start: int, layer_stop: int, out: torch.Tensor
    ) -> int:
        """See `KvPool.gather`. One array operation over the runs of all layers."""
        used = self.payload_bytes(len(slots), layer_start, layer_stop)
        assert used <= out.numel(), f"a payload of {used} bytes exceeds {out.numel()}"
        source, index = self._locate(torch.from_numpy(slots), layer_start, layer_stop)
        torch.index_select(source, 0, index, out=self._as_runs(out[:used]))
        return used

    def scatter(
        self, slots: SlotIndices, layer_start: int, layer_stop: int, payload: torch.Tensor
    ) -> None:
        """See `KvPool.scatter`. One array operation over the runs of all layers."""
        used = self.payload_bytes(len(slots), layer_start, layer_stop)
        assert used <= payload.numel(), f"a payload of {payload.numel()} bytes lacks {used}"
        target, index = self._locate(torch.from_numpy(slots), layer_start, layer_stop)
        target.index_copy_(0, index, self._as_runs(payload[:used]))

    def _store(self, layer: int, slots: torch.Tensor, stored: torch.Tensor) -> None:
        """Put stored units [planes, T, heads, width] of one layer into `slots` (int64 [T])."""
        target, index = self._locate(slots, layer, layer + 1)
        target.index_copy_(0, index, self._as_runs(stored.view(-1).view(torch.uint8)))

    def _load(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """A copy of the stored units [planes, T, heads, width] of `slots` (int64 [T])."""
        source, index = self._locate(slots, layer, layer + 1)
        stored = source.index_select(0, index).view(-1).view(self._codec.storage)
        layout = self.layout
        return stored.view(layout.planes, len(slots), layout.heads, self.buffer.shape[-1])

    def _locate(
        self, slots: torch.Tensor, layer_start: int, layer_stop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The runs of some layers as one table, and which of its rows hold `slots`."""
        _, planes, runs, words = self._runs.shape
        table = self._runs[layer_start:layer_stop].view(-1, words)
        first = torch.arange(planes * (layer_stop - layer_start), device=table.device) * runs
        within = self._run_index(slots.to(table.device))
        return table, (first[:, None] + within).view(-1)

    def _run_index(self, slots: torch.Tensor) -> torch.Tensor:
        """Runs within a plane of `slots`, token by token."""
        if not self._by_head:
            return slots
        heads, page_size = self.layout.heads, self.layout.page_size
        within = slots % page_size
        first = (slots - within) * heads + within
        return (first[:, None] + torch.arange(heads, device=slots.device) * page_size).view(-1)

    def _as_runs(self, content: torch.Tensor) -> torch.Tensor:
        """uint8 [n * bytes of a run] -> words [n, words of a run], the same memory."""
        return content.view(self._word).view(-1, self._runs.shape[-1])
