"""KV whose content says whose it is, and a pool that remembers what it copied last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvferry.config import KvDType
from mem_cache.layout import KvLayout, KvPart

if TYPE_CHECKING:
    from kvferry.ids import SlotIndices, TokenIds

LAYERS, PLANES, HEAD_DIM = 2, 2, 4
POISON = np.float32(-1.0)
"""What a reserved slot holds until its KV is here: no token's content."""


@dataclass(frozen=True, slots=True)
class Copied:
    """The last gather or scatter of a pool."""

    slots: SlotIndices
    part: KvPart


class SimPool:
    """A `KvPool` in numpy, a tenth of the time of the real one for a handful of tokens."""

    def __init__(self, layout: KvLayout, num_slots: int) -> None:
        self.layout = layout
        self.num_slots = num_slots
        shape = (LAYERS, PLANES, num_slots + layout.page_size, layout.num_kv_heads, HEAD_DIM)
        self.store = np.zeros(shape, np.float32)
        self.buffer = torch.from_numpy(self.store)
        self.copied: Copied | None = None

    def payload_bytes(self, num_tokens: int, part: KvPart) -> int:
        """See `KvPool`."""
        return part.layers * PLANES * num_tokens * part.heads * HEAD_DIM * 4

    def gather(self, slots: SlotIndices, part: KvPart, out: torch.Tensor) -> int:
        """See `KvPool`."""
        self.copied = Copied(slots, part)
        taken = self._layers(part)[:, :, slots, part.head_start : part.head_stop]
        raw = np.ascontiguousarray(taken).view(np.uint8).reshape(-1)
        out.numpy()[: raw.size] = raw
        return raw.size

    def scatter(self, slots: SlotIndices, part: KvPart, payload: torch.Tensor) -> None:
        """See `KvPool`."""
        self.copied = Copied(slots, part)
        shape = (part.layers, PLANES, len(slots), part.heads, HEAD_DIM)
        content = payload.numpy().view(np.float32).reshape(shape)
        self._layers(part)[:, :, slots, part.head_start : part.head_stop] = content

    def put(self, slots: SlotIndices, content: np.ndarray, layer_start: int) -> None:
        """Write `content` [layers, planes, T, heads, D] from `layer_start` on."""
        self.store[layer_start : layer_start + len(content), :, slots] = content

    def get(self, slots: SlotIndices) -> np.ndarray:
        """The content of `slots`, [layers, planes, T, heads, D]."""
        return self.store[:, :, slots]

    def _layers(self, part: KvPart) -> np.ndarray:
        return self.store[part.layer_start : part.layer_stop]


def sim_layout(heads: int, page_size: int) -> KvLayout:
    """What every simulated worker agrees on; `heads` are those of one rank."""
    return KvLayout(LAYERS, heads, HEAD_DIM, KvDType.FLOAT32, page_size)


def content_of(prompt: TokenIds, heads: int) -> np.ndarray:
    """The KV of a prompt: [layers, planes, T, heads, D], different in every cell.

    A function of token, position, layer, plane, head and element, and exact in float32.
    """
    place = np.arange(LAYERS * PLANES * heads * HEAD_DIM, dtype=np.float32) / 64
    place = place.reshape(LAYERS, PLANES, 1, heads, HEAD_DIM)
    token = (prompt * 64 + np.arange(len(prompt))).astype(np.float32)
    return place + token[None, None, :, None, None]
