"""The compressed KV of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

No model of the engine uses it yet: `engine.decoder` has no latent attention.
"""

from __future__ import annotations

import torch

from mem_cache.layout import MlaLayout
from mem_cache.paged_pool import PagedPool


class MLATokenToKVPool(PagedPool[MlaLayout]):
    """Implements `KvPool`: one plane, of each token the latent [R], then the rotated part."""

    @property
    def in_place_dtype(self) -> torch.dtype | None:
        """See `KvPool.in_place_dtype`: a latent is neither K nor V."""
        return None

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `KvPool.layer`: views of latent and rotated part."""
        cut = self.layout.latent_bytes // self.buffer.itemsize
        stored = self.buffer[layer, 0, :, 0]
        return stored[:, :cut], stored[:, cut:]

    def write(
        self, layer: int, slots: torch.Tensor, first: torch.Tensor, second: torch.Tensor
    ) -> None:
        """See `KvPool.write`: latent [T, R] and rotated part [T, D_rope]."""
        parts = [self._codec.encode(first), self._codec.encode(second)]
        self._store(layer, slots, torch.cat(parts, dim=-1)[None, :, None])

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `KvPool.read`: latent [T, R] and rotated part [T, D_rope]."""
        stored = self._load(layer, slots)[0, :, 0]
        cut = self.layout.latent_bytes // stored.itemsize
        return self._codec.decode(stored[:, :cut]), self._codec.decode(stored[:, cut:])
