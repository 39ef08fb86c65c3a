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


@dataclass(frozen=True, slots=True)
class KvPart:
    """Some layers and heads of a pool: what of a token's KV a payload holds."""

    layer_start: int
    layer_stop: int
    head_start: int
    """Heads are numbered within the pool: under tensor parallelism each rank begins at 0."""
    head_stop: int

    def __post_init__(self) -> None:
        assert 0 <= self.layer_start <= self.layer_stop, f"{self} has no such layers"
        assert 0 <= self.head_start <= self.head_stop, f"{self} has no such heads"

    @property
    def layers(self) -> int:
        """How many layers."""
        return self.layer_stop - self.layer_start

    @property
    def heads(self) -> int:
        """How many heads."""
        return self.head_stop - self.head_start


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
    def whole(self) -> KvPart:
        """All layers and heads."""
        return KvPart(0, self.num_layers, 0, self.heads)

    @property
    def page_hash(self) -> str:
        """Equal for two pools iff a page's payload means the same to both, byte for byte."""
        return _digest(f"{self._token_format(ranks=1)}/{self.page_size}")

    def exchange_hash(self, ranks: int = 1, model: str = "") -> str:
        """Equal for two workers iff their KV can be exchanged token by token.

        `ranks`: pools of this layout that together hold a worker's KV. Neither page size nor
        arrangement counts: a payload is token by token (see `KvPool`), cut by heads where two
        workers differ in ranks. `model`: what computes the KV (`kvferry.weights_identity`); the KV
        of another model has the same form, and another meaning.
        """
        token_format = self._token_format(ranks)
        return _digest(f"{token_format}/{model}" if model else token_format)

    def round_up(self, tokens: int) -> int:
        """`tokens` rounded up to whole pages."""
        return -(-tokens // self.page_size) * self.page_size

    def round_down(self, tokens: int) -> int:
        """`tokens` rounded down to whole pages."""
        return tokens // self.page_size * self.page_size

    def _token_format(self, ranks: int) -> str:
        """What the bytes of a token's KV are, over all ranks."""
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

    def _token_format(self, ranks: int) -> str:
        heads = self.num_kv_heads * ranks
        return f"NHD/{self.num_layers}/{heads}/{self.head_dim}/{self.dtype.value}"


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

    def _token_format(self, ranks: int) -> str:
        # Every rank holds the whole latent.
        return (
            f"MLA/{self.num_layers}/{self.kv_lora_rank}/{self.qk_rope_head_dim}/{self.dtype.value}"
        )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check_sizes(*sizes: int) -> None:
    assert min(sizes) > 0, f"a layout has positive sizes, not {sizes}"


def _check_dtype(dtype: KvDType) -> None:
    assert dtype in _ELEMENT_BYTES, f"a layout's dtype is a KvDType other than AUTO, not {dtype}"
