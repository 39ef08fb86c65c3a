"""How numbers become the stored elements of KV and back, and the torch type of each.

| KvDType | stored as | error of one element x |
|---|---|---|
| float32 | itself | 0 |
| float16, bfloat16 | nearest | `abs(x) * 2^-11`, `abs(x) * 2^-8`; float16: at least `2^-25` |
| float8 e4m3, e5m2 | nearest | `abs(x) * 2^-4`, `abs(x) * 2^-3`; at least `2^-10`, `2^-17` |
| int8 | `s`, then `q = round(x / s)`, `s = max(abs(x)) / 127` over a head | `s / 2` |

Numbers beyond what a narrower float holds become its largest: an infinity in K or V would spread
over every later token. NaN stays NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from kvferry.config import KvDType
from mem_cache.layout import SCALE_BYTES

if TYPE_CHECKING:
    from kvferry.config import DType

_TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "float8_e4m3": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
_INT8_MAX = 127
_SCALE_MIN = torch.finfo(torch.float32).tiny
"""Keeps the quotient finite where all numbers are (nearly) 0."""


def torch_dtype(dtype: DType | KvDType) -> torch.dtype:
    """The torch element type of a configured one; not of `AUTO`."""
    return _TORCH_DTYPES[dtype.value]


class ElementCodec(Protocol):
    """Stores vectors along the last dimension; the others are as they come."""

    @property
    def storage(self) -> torch.dtype:
        """Element type of what is stored."""
        ...

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Floating numbers [..., D] -> storage [..., bytes of a vector / bytes of an element]."""
        ...

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """The inverse, up to rounding: storage [..., width] -> float32 [..., D]."""
        ...


def codec_of(dtype: KvDType) -> ElementCodec:
    """How KV of this type is stored."""
    if dtype is KvDType.INT8:
        return Int8Codec()
    storage = torch_dtype(dtype)
    return Float8Codec(storage) if storage.itemsize == 1 else CastCodec(storage)


class CastCodec:
    """Each number in a floating type of its own."""

    def __init__(self, storage: torch.dtype) -> None:
        self.storage = storage
        self._largest = torch.finfo(storage).max

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """See `ElementCodec.encode`."""
        if torch.finfo(values.dtype).max > self._largest:
            values = values.clamp(-self._largest, self._largest)
        return values.to(self.storage)

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """See `ElementCodec.decode`."""
        return stored.float()


class Float8Codec(CastCodec):
    """Decodes by a table of all 256 numbers: torch takes six times as long for e4m3."""

    def __init__(self, storage: torch.dtype) -> None:
        super().__init__(storage)
        self._table = torch.arange(256, dtype=torch.uint8).view(storage).float()

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """See `ElementCodec.decode`."""
        bits = stored.view(torch.uint8).to(torch.int32).reshape(-1)
        return self._table.to(bits.device).index_select(0, bits).view(stored.shape)


class Int8Codec:
    """A float32 scale, then whole numbers -127..127: symmetric, one scale per vector.

    A vector with an infinity or NaN reads as numbers none of which is finite.
    """

    storage = torch.uint8

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """See `ElementCodec.encode`."""
        wide = values.float()
        scale = (wide.abs().amax(dim=-1, keepdim=True) / _INT8_MAX).clamp_(min=_SCALE_MIN)
        steps = (wide / scale).round_().clamp_(-_INT8_MAX, _INT8_MAX).to(torch.int8)
        return torch.cat([scale.view(torch.uint8), steps.view(torch.uint8)], dim=-1)

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """See `ElementCodec.decode`."""
        scale = stored[..., :SCALE_BYTES].view(torch.float32)
        return stored[..., SCALE_BYTES:].view(torch.int8).float().mul_(scale)
