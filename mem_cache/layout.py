"""How the KV of one token is laid out in memory, and what it costs. Loads no torch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from kvferry.config import DType, KvArrangement, KvDType
from kvferry.errors import ConfigError

_ELEMENT_BYTES = {
    KvDType.FLOAT32: 4,
    KvDType.FLOAT16: 2,
    KvDType.BFLOAT16: 2,
    KvDType.INT8: 1,
    KvDType.FLOAT8_E4M3: 1,
    KvDType.FLOAT8_E5M2: 1,
}
SCALE_BYTES = 4
"""int8: one float32 before the elements that it scales."""


def kv_dtype(configured: KvDType, model: DType) -> KvDType:
    """The element type of KV: the configured one; for `AUTO` the model's."""
    return KvDType(model.value) if configured is KvDType.AUTO else configured


def vector_bytes(dtype: KvDType, elements: int) -> int:
    """Bytes of a stored vector of `elements` numbers, its scale included.

    Raises `ConfigError` where the scale of the next vector would not be aligned.
    """
    if dtype is not KvDType.INT8:
        return elements * _ELEMENT_BYTES[dtype]
    if elements % SCALE_BYTES:
        raise ConfigError(
            "cache.dtype",
            f"is int8; vectors of {elements} elements (the model's head_dim) are no whole words",
        )
    return SCALE_BYTES + elements


class PagedLayout:
    """What all layouts have: pages of tokens, a token a number of equal units per layer.

    A layer has `planes` per token (K and V; or one latent), a plane `heads` units of `unit_bytes`.
    """

    __slots__ = ()

    num_layers: int
    dtype: KvDType
    """Element type, never `AUTO`."""
    page_size: int
    """Slots per page: the unit of matching, allocating and freeing."""

    @property
    def planes(self) -> int:
        """Separately stored parts of a token in a layer."""
        raise NotImplementedError

    @property
    def heads(self) -> int:
        """Units of a plane."""
        raise NotImplementedError

    @property
    def unit_bytes(self) -> int:
        """Bytes of one head of one plane of one token."""
        raise NotImplementedError

    @property
    def order(self) -> KvArrangement:
        """Whether a page holds its tokens' heads token by token or head by head."""
        raise NotImplementedError

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers, scales included."""
        return self.num_layers * self.planes * self.heads * self.unit_bytes

    @property
    def layout_hash(self) -> str:
        """Equal for two workers iff their KV can be exchanged byte for byte, page for page.

        The arrangement is not in it: what is exchanged is token by token in either (see `KvPool`).
        """
        return hashlib.sha256(self._exchange_format().encode()).hexdigest()[:16]

    def round_up(self, tokens: int) -> int:
        """`tokens` rounded up to whole pages."""
        return -(-tokens // self.page_size) * self.page_size

    def round_down(self, tokens: int) -> int:
        """`tokens` rounded down to whole pages."""
        return tokens // self.page_size * self.page_size

    def _exchange_format(self) -> str:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class KvLayout(PagedLayout):
    """K and V of multi-head or grouped-query attention.

    Bytes per token: 2 * L * H_kv * D * b; for int8 2 * L * H_kv * (D + 4).
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: KvDType
    page_size: int
    arrangement: KvArrangement = KvArrangement.NHD

    def __post_init__(self) -> None:
        _check_sizes(self.num_layers, self.num_kv_heads, self.head_dim, self.page_size)
        _check_dtype(self.dtype)
        vector_bytes(self.dtype, self.head_dim)

    @property
    def planes(self) -> int:
        """K and V."""
        return 2

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.num_kv_heads

    @property
    def unit_bytes(self) -> int:
        """Bytes of K or V of one head of one token."""
        return vector_bytes(self.dtype, self.head_dim)

    @property
    def order(self) -> KvArrangement:
        """As configured."""
        return self.arrangement

    def _exchange_format(self) -> str:
        return (
            f"NHD/{self.num_layers}/{self.num_kv_heads}/{self.head_dim}"
            f"/{self.dtype.value}/{self.page_size}"
        )


@dataclass(frozen=True, slots=True)
class MlaLayout(PagedLayout):
    """The latent of multi-head latent attention: one vector per token, shared by all heads.

    Bytes per token: L * (R + D_rope) * b; for int8 L * (R + 4 + D_rope + 4).
    """

    num_layers: int
    kv_lora_rank: int
    """R: elements of the compressed K and V."""
    qk_rope_head_dim: int
    """D_rope: elements of the key's rotated part."""
    dtype: KvDType
    page_size: int

    def __post_init__(self) -> None:
        _check_sizes(self.num_layers, self.kv_lora_rank, self.qk_rope_head_dim, self.page_size)
        _check_dtype(self.dtype)
        assert self.unit_bytes > 0

    @property
    def planes(self) -> int:
        """Latent and rotated part lie in one."""
        return 1

    @property
    def heads(self) -> int:
        """None of its own."""
        return 1

    @property
    def latent_bytes(self) -> int:
        """Bytes of the latent of one token in a layer; the rotated part follows it."""
        return vector_bytes(self.dtype, self.kv_lora_rank)

    @property
    def unit_bytes(self) -> int:
        """Bytes of latent and rotated part of one token in a layer."""
        return self.latent_bytes + vector_bytes(self.dtype, self.qk_rope_head_dim)

    @property
    def order(self) -> KvArrangement:
        """Of one head there is one order."""
        return KvArrangement.NHD

    def _exchange_format(self) -> str:
        return (
            f"MLA/{self.num_layers}/{self.kv_lora_rank}/{self.qk_rope_head_dim}"
            f"/{self.dtype.value}/{self.page_size}"
        )


def _check_sizes(*sizes: int) -> None:
    assert min(sizes) > 0, f"a layout has positive sizes, not {sizes}"


def _check_dtype(dtype: KvDType) -> None:
    assert dtype in _ELEMENT_BYTES, f"a layout's dtype is a KvDType other than AUTO, not {dtype}"
