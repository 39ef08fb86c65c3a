"""K and V of multi-head or grouped-query attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.config import KvDType
from mem_cache.layout import KvLayout
from mem_cache.paged_pool import PagedPool

if TYPE_CHECKING:
    import torch


class MHATokenToKVPool(PagedPool[KvLayout]):
    """Implements `KvPool`: plane 0 is K, plane 1 is V, both [T, H_kv, D]."""

    @property
    def in_place_dtype(self) -> torch.dtype | None:
        """See `KvPool.in_place_dtype`."""
        if self._by_head or self.layout.dtype is KvDType.INT8:
            return None
        return self.buffer.dtype

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `KvPool.layer`."""
        return self.buffer[layer, 0], self.buffer[layer, 1]

    def write(
        self, layer: int, slots: torch.Tensor, first: torch.Tensor, second: torch.Tensor
    ) -> None:
        """See `KvPool.write`: K and V."""
        self._write_plane(layer, 0, slots, self._codec.encode(first))
        self._write_plane(layer, 1, slots, self._codec.encode(second))

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `KvPool.read`: K and V."""
        keys, values = (self._read_plane(layer, plane, slots) for plane in (0, 1))
        return self._codec.decode(keys), self._codec.decode(values)
