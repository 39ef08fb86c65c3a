"""The stored bytes of a worker's KV, for any layout: one buffer, addressed by slot."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from kvferry.config import KvArrangement
from mem_cache.element_codec import codec_of
from mem_cache.layout import KvPart, PagedLayout
from mem_cache.slot_runs import slot_runs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvferry.ids import SlotIndices
    from mem_cache.slot_runs import SlotRun

LayoutT = TypeVar("LayoutT", bound=PagedLayout)

COPY_BYTES = 2**20
"""Copied at once within a pool, at least a token: what a processor's cache holds."""

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
        parts = [KvPart(layer, layer + 1, 0, layout.heads) for layer in range(layout.num_layers)]
        self._layers = [(part, self._table(part)) for part in parts]
        """Made once: a model writes and reads layer by layer."""

    def copy(self, source: SlotIndices, target: SlotIndices) -> None:
        """See `KvPool.copy`. In pieces, so that little memory is needed."""
        assert len(source) == len(target), f"{len(source)} slots to {len(target)}"
        whole = self.layout.whole
        tokens = max(1, COPY_BYTES // self.layout.bytes_per_token)
        piece = torch.empty(
            self.payload_bytes(min(tokens, len(source)), whole),
            dtype=torch.uint8,
            device=self.buffer.device,
        )
        for first in range(0, len(source), tokens):
            self.gather(source[first : first + tokens], whole, piece)
            self.scatter(target[first : first + tokens], whole, piece)

    def payload_bytes(self, num_tokens: int, part: KvPart) -> int:
        """See `KvPool.payload_bytes`."""
        layout = self.layout
        return part.layers * layout.planes * num_tokens * part.heads * layout.unit_bytes

    def gather(self, slots: SlotIndices, part: KvPart, out: torch.Tensor) -> int:
        """See `KvPool.gather`. Run by run, or all at once where slots are scattered."""
        used = self.payload_bytes(len(slots), part)
        assert used <= out.numel(), f"a payload of {used} bytes exceeds {out.numel()}"
        if not used:
            return 0
        if out.device != self.buffer.device:
            # For a link through host memory.
            staged = torch.empty(used, dtype=torch.uint8, device=self.buffer.device)
            out[: self.gather(slots, part, staged)].copy_(staged)
            return used
        table = self._table(part)
        rows = _as_rows_of(table, out[:used])
        runs = slot_runs(slots, self.layout.page_size if self._by_head else None)
        if runs is None:
            torch.index_select(table, 0, self._row_index(slots, part), out=rows)
        else:
            for stored, moved in self._pieces(table, part, runs, rows):
                moved.copy_(stored)
        self._end_copies()
        return used

    def scatter(self, slots: SlotIndices, part: KvPart, payload: torch.Tensor) -> None:
        """See `KvPool.scatter`. Run by run, or all at once where slots are scattered."""
        used = self.payload_bytes(len(slots), part)
        assert used <= payload.numel(), f"a payload of {payload.numel()} bytes lacks {used}"
        if not used:
            return
        if payload.device != self.buffer.device:
            self.scatter(slots, part, payload[:used].to(self.buffer.device))
            return
        table = self._table(part)
        rows = _as_rows_of(table, payload[:used])
        runs = slot_runs(slots, self.layout.page_size if self._by_head else None)
        if runs is None:
            table.index_copy_(0, self._row_index(slots, part), rows)
        else:
            for stored, moved in self._pieces(table, part, runs, rows):
                stored.copy_(moved)
        self._end_copies()

    def _end_copies(self) -> None:
        """A copy on a device is only begun when torch returns; whoever is told of it reads it."""
        if self.buffer.is_cuda:
            torch.cuda.current_stream().synchronize()

    def _store(self, layer: int, slots: torch.Tensor, stored: torch.Tensor) -> None:
        """Put stored units [planes, T, heads, width] of one layer into `slots` (int64 [T])."""
        part, table = self._layers[layer]
        rows = _as_rows_of(table, stored.view(-1).view(torch.uint8))
        table.index_copy_(0, self._rows_of(slots, part), rows)

    def _load(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """A copy of the stored units [planes, T, heads, width] of `slots` (int64 [T])."""
        part, table = self._layers[layer]
        rows = table.index_select(0, self._rows_of(slots, part))
        stored = rows.view(-1).view(self._codec.storage)
        layout = self.layout
        return stored.view(layout.planes, len(slots), layout.heads, self.buffer.shape[-1])

    def _table(self, part: KvPart) -> torch.Tensor:
        """Words [rows, words of a run]: what each layer and plane of the part stores.

        A row is the part's heads of a slot (NHD), or one head, of all there are (HND).
        """
        layout = self.layout
        assert part.layer_stop <= layout.num_layers, f"{part} of {layout.num_layers} layers"
        assert part.head_stop <= layout.heads, f"{part} of {layout.heads} heads"
        unit = layout.unit_bytes
        if self._by_head:
            row_bytes, start, stop = unit, 0, unit
        else:
            row_bytes = layout.heads * unit
            start, stop = part.head_start * unit, part.head_stop * unit
        cut = math.gcd(row_bytes, start, stop)
        word = next(word for word in _WORDS if cut % word.itemsize == 0)
        layers = self._content.view(word).view(layout.num_layers, -1)
        rows = layers[part.layer_start : part.layer_stop].view(-1, row_bytes // word.itemsize)
        return rows[:, start // word.itemsize : stop // word.itemsize]

    def _row_index(self, slots: SlotIndices, part: KvPart) -> torch.Tensor:
        return self._rows_of(torch.from_numpy(slots), part)

    def _rows_of(self, slots: torch.Tensor, part: KvPart) -> torch.Tensor:
        """Which rows of the part's table hold `slots`, in the order of a payload."""
        slots = slots.to(self.buffer.device)
        layout = self.layout
        planes = torch.arange(part.layers * layout.planes, device=slots.device)
        physical = self.num_slots + layout.page_size
        if not self._by_head:
            return (planes[:, None] * physical + slots).view(-1)
        within = slots % layout.page_size
        first = (slots - within) * layout.heads + within
        heads = torch.arange(part.head_start, part.head_stop, device=slots.device)
        of_plane = (first[:, None] + heads * layout.page_size).view(-1)
        return (planes[:, None] * (physical * layout.heads) + of_plane).view(-1)

    def _pieces(
        self, table: torch.Tensor, part: KvPart, runs: list[SlotRun], rows: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each run what its slots store and its place among a payload's rows, of one shape."""
        layout, (_, words) = self.layout, table.shape
        planes = part.layers * layout.planes
        physical = self.num_slots + layout.page_size
        # A slice would be cut short where an index is refused.
        assert all(0 <= slot <= physical - tokens for _, slot, tokens in runs), "no such slots"
        if not self._by_head:
            stored, moved = table.view(planes, -1, words), rows.view(planes, -1, words)
            for first, slot, tokens in runs:
                yield stored[:, slot : slot + tokens], moved[:, first : first + tokens]
            return
        pages = table.view(planes, -1, layout.heads, layout.page_size, words)
        pages = pages[:, :, part.head_start : part.head_stop].transpose(2, 3)
        moved = rows.view(planes, -1, part.heads, words)
        for first, slot, tokens in runs:
            page, within = divmod(slot, layout.page_size)
            count = max(1, tokens // layout.page_size)
            each = tokens // count
            stored = pages[:, page : page + count, within : within + each]
            some = moved[:, first : first + tokens]
            yield stored, some.view(planes, count, each, part.heads, words)


def _as_rows_of(table: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
    """uint8 [n * bytes of a row of `table`] -> words [n, words of a row], the same memory."""
    return content.view(table.dtype).view(-1, table.shape[1])
