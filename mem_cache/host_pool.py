"""The K/V bytes of the host tier, and the copies between it and the device's pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvferry.ids import SlotIndices
    from mem_cache.kv_pool import KvPool

PIECE_BYTES = 2**20
"""Copied between two looks at whether the copy is still wanted, at least a page. Small enough for
a processor's cache, which holds the intermediate copies then: faster than pieces of 8 MiB."""

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class HostPool:
    """Pages of KV in host memory, page-first: uint8 `[pages, page_bytes]`.

    A page is the payload of its tokens, `[L, planes, page_size, heads, unit_bytes]`, contiguous,
    so that it can be written to a file as one piece. Pinned if the device is not the host. Host
    slots are chosen by others; slot s is in page `s // page_size`, and pages begin at 1, as on the
    device.
    """

    def __init__(self, pool: KvPool, num_slots: int, device: str = "cpu") -> None:
        layout = pool.layout
        assert num_slots % layout.page_size == 0, f"{num_slots} host slots are not whole pages"
        self.page_size = layout.page_size
        self.num_slots = num_slots
        self.page_hash = layout.page_hash
        self.page_bytes = pool.payload_bytes(layout.page_size, layout.whole)
        self._pool = pool
        self._device = torch.device(device)
        self._planes = layout.num_layers * layout.planes
        plane_bytes = self.page_bytes // self._planes
        self._word = next(word for word in _WORDS if plane_bytes % word.itemsize == 0)
        self._plane_words = plane_bytes // self._word.itemsize
        pages = num_slots // layout.page_size
        # Not touched here: memory is taken page by page as the tier fills.
        self._pages = torch.empty(
            (pages, self.page_bytes), dtype=torch.uint8, pin_memory=self._device.type != "cpu"
        )

    def page(self, slot: int) -> torch.Tensor:
        """uint8 [page_bytes], a view: the page that begins at host slot `slot`."""
        return self._pages[slot // self.page_size - 1]

    def store(
        self, slots: SlotIndices, host_slots: SlotIndices, is_cancelled: Callable[[], bool]
    ) -> None:
        """Copy whole pages from device slots to host slots. Ends early when cancelled."""
        whole = self._pool.layout.whole
        for some, host_some in self._pieces(slots, host_slots):
            if is_cancelled():
                return
            payload = self._scratch(some)
            self._pool.gather(some, whole, payload)
            pages = self._by_page(payload).transpose(0, 1).contiguous().flatten(1)
            self._words(self._pages).index_copy_(0, self._rows(host_some), pages.to("cpu"))

    def load(
        self, slots: SlotIndices, host_slots: SlotIndices, is_cancelled: Callable[[], bool]
    ) -> None:
        """Copy whole pages from host slots to device slots. Ends early when cancelled."""
        whole = self._pool.layout.whole
        for some, host_some in self._pieces(slots, host_slots):
            if is_cancelled():
                return
            payload = self._scratch(some)
            pages = self._words(self._pages).index_select(0, self._rows(host_some))
            by_page = pages.view(-1, self._planes, self._plane_words)
            self._by_page(payload).copy_(by_page.transpose(0, 1))
            self._pool.scatter(some, whole, payload)

    def _by_page(self, payload: torch.Tensor) -> torch.Tensor:
        """[planes, pages, words of a page in a plane]: a payload of `gather`, seen by page."""
        return self._words(payload).view(self._planes, -1, self._plane_words)

    def _words(self, data: torch.Tensor) -> torch.Tensor:
        """The same memory in the widest elements that fit: array operations count elements."""
        return data.view(self._word)

    def _scratch(self, slots: SlotIndices) -> torch.Tensor:
        pages = len(slots) // self.page_size
        return torch.empty(pages * self.page_bytes, dtype=torch.uint8, device=self._device)

    def _rows(self, host_slots: SlotIndices) -> torch.Tensor:
        return torch.from_numpy(host_slots[:: self.page_size] // self.page_size - 1)

    def _pieces(
        self, slots: SlotIndices, host_slots: SlotIndices
    ) -> Iterator[tuple[SlotIndices, SlotIndices]]:
        assert len(slots) == len(host_slots), f"{len(slots)} slots and {len(host_slots)} host slots"
        step = max(1, PIECE_BYTES // self.page_bytes) * self.page_size
        for first in range(0, len(slots), step):
            yield slots[first : first + step], host_slots[first : first + step]
