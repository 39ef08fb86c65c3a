"""How the KV of one token is laid out in memory, and what it costs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.config import DType


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape and element type of a worker's KV, with its page size. NHD: heads within a token."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: DType
    page_size: int
    """Slots per page: the unit of matching, allocating and freeing."""

    def __post_init__(self) -> None:
        sizes = (self.num_layers, self.num_kv_heads, self.head_dim, self.page_size)
        assert min(sizes) > 0, f"a layout has positive sizes, not {sizes}"

    @property
    def element_bytes(self) -> int:
        """Bytes of one K or V element."""
        return self.dtype.element_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the K and V of one token in all layers: 2 * L * H_kv * D * b."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.element_bytes

    @property
    def layout_hash(self) -> str:
        """Equal for two workers iff their KV can be exchanged byte for byte, page for page."""
        text = (
            f"NHD/{self.num_layers}/{self.num_kv_heads}/{self.head_dim}"
            f"/{self.dtype.value}/{self.page_size}"
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def round_up(self, tokens: int) -> int:
        """`tokens` rounded up to whole pages."""
        return -(-tokens // self.page_size) * self.page_size

    def round_down(self, tokens: int) -> int:
        """`tokens` rounded down to whole pages."""
        return tokens // self.page_size * self.page_size
