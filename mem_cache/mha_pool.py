"""K and V of multi-head or grouped-query attention."""

from __future__ import annotations

import torch

from kvferry.config import KvDType
from mem_cache.layout import KvLayout
from mem_cache.paged_pool import PagedPool


class MHATokenToKVPool(PagedPool[KvLayout]):
    """Implements `KvPool`: plane 0 is K, plane 1 is V, both [T, H_kv, D]."""

    def __init__(self, layout: KvLayout, num_slots: int, device: str = "cpu") -> None:
        super().__init__(layout, num_slots, device)
        self._views = [(planes[0], planes[1]) for planes in self.buffer]
        """Of each layer, made once: a step asks for all of them, twice."""

    @property
    def in_place_dtype(self) -> torch.dtype | None:
        """See `KvPool.in_place_dtype`."""
        if self._by_head or self.layout.dtype is KvDType.INT8:
            return None
        return self.buffer.dtype

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `KvPool.layer`."""
        return self._views[layer]

    def write(
        self, layer: int, slots: torch.Tensor, first: torch.Tensor, second: torch.Tensor
    ) -> None:
        """See `KvPool.write`: K and V."""
        self._store(layer, slots, self._codec.encode(torch.stack([first, second])))

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `KvPool.read`: K and V."""
        keys, values = self._codec.decode(self._load(layer, slots)).unbind()
        return keys, values
