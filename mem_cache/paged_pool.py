"""The stored bytes of a worker's KV, for any layout: one buffer, addressed by slot."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from kvferry.config import KvArrangement
from mem_cache.element_codec import codec_of
from mem_cache.layout import KvPart, PagedLayout

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

    A *run* is what is contiguous of a token: the part's heads of a plane (NHD), or one (HND).
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
        self._content = self.buffer.view(-1).view(torch.uint8)

    def payload_bytes(self, num_tokens: int, part: KvPart) -> int:
        """See `KvPool.payload_bytes`."""
        layout = self.layout
        return part.layers * layout.planes * num_tokens * part.heads * layout.unit_bytes

    def gather(self, slots: SlotIndices, part: KvPart, out: torch.Tensor) -> int:
        """See `KvPool.gather`. One array operation over the runs of all layers."""
        used = self.payload_bytes(len(slots), part)
        assert used <= out.numel(), f"a payload of {used} bytes exceeds {out.numel()}"
        if used:
            source, index = self._locate(torch.from_numpy(slots), part)
            torch.index_select(source, 0, index, out=_as_rows_of(source, out[:used]))
        return used

    def scatter(self, slots: SlotIndices, part: KvPart, payload: torch.Tensor) -> None:
        """See `KvPool.scatter`. One array operation over the runs of all layers."""
        used = self.payload_bytes(len(slots), part)
        assert used <= payload.numel(), f"a payload of {payload.numel()} bytes lacks {used}"
        if used:
            target, index = self._locate(torch.from_numpy(slots), part)
            target.index_copy_(0, index, _as_rows_of(target, payload[:used]))

    def _store(self, layer: int, slots: torch.Tensor, stored: torch.Tensor) -> None:
        """Put stored units [planes, T, heads, width] of one layer into `slots` (int64 [T])."""
        target, index = self._locate(slots, self._layer_part(layer))
        target.index_copy_(0, index, _as_rows_of(target, stored.view(-1).view(torch.uint8)))

    def _load(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """A copy of the stored units [planes, T, heads, width] of `slots` (int64 [T])."""
        source, index = self._locate(slots, self._layer_part(layer))
        stored = source.index_select(0, index).view(-1).view(self._codec.storage)
        layout = self.layout
        return stored.view(layout.planes, len(slots), layout.heads, self.buffer.shape[-1])

    def _layer_part(self, layer: int) -> KvPart:
        return KvPart(layer, layer + 1, 0, self.layout.heads)

    def _locate(self, slots: torch.Tensor, part: KvPart) -> tuple[torch.Tensor, torch.Tensor]:
        """Words [rows, words of a run]: the part's runs; and which of the rows hold `slots`."""
        layout = self.layout
        unit = layout.unit_bytes
        assert part.layer_stop <= layout.num_layers, f"{part} of {layout.num_layers} layers"
        assert part.head_stop <= layout.heads, f"{part} of {layout.heads} heads"
        if self._by_head:
            row_bytes, first, run_bytes = unit, 0, unit
        else:
            row_bytes, first, run_bytes = (
                layout.heads * unit,
                part.head_start * unit,
                part.heads * unit,
            )
        cut = math.gcd(row_bytes, first, run_bytes)
        word = next(word for word in _WORDS if cut % word.itemsize == 0)
        planes = self._content.view(word).view(
            layout.num_layers * layout.planes, -1, row_bytes // word.itemsize
        )
        runs = planes.shape[1]
        some = planes[part.layer_start * layout.planes : part.layer_stop * layout.planes]
        table = some.view(-1, row_bytes // word.itemsize)
        table = table[:, first // word.itemsize : (first + run_bytes) // word.itemsize]
        begins = torch.arange(len(some), device=table.device) * runs
        within = self._run_index(slots.to(table.device), part)
        return table, (begins[:, None] + within).view(-1)

    def _run_index(self, slots: torch.Tensor, part: KvPart) -> torch.Tensor:
        """Of a plane, which runs hold `slots`, token by token."""
        if not self._by_head:
            return slots
        page_size = self.layout.page_size
        within = slots % page_size
        begins = (slots - within) * self.layout.heads + within
        heads = torch.arange(part.head_start, part.head_stop, device=slots.device)
        return (begins[:, None] + heads * page_size).view(-1)


def _as_rows_of(table: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
    """uint8 [n * bytes of a row of `table`] -> words [n, words of a row], the same memory."""
    return content.view(table.dtype).view(-1, table.shape[1])
