"""One small pool of every kind, and by how much each may round."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvferry.config import KvArrangement, KvDType
from mem_cache.layout import KvLayout, MlaLayout

if TYPE_CHECKING:
    from mem_cache.layout import PagedLayout

ELEMENT_TYPES = tuple(dtype for dtype in KvDType if dtype is not KvDType.AUTO)
# (relative, absolute): half the spacing of neighbouring numbers, and of the smallest ones.
_ROUNDING = {
    KvDType.FLOAT32: (0.0, 0.0),
    KvDType.FLOAT16: (2.0**-11, 2.0**-25),
    KvDType.BFLOAT16: (2.0**-8, 2.0**-134),
    KvDType.FLOAT8_E4M3: (2.0**-4, 2.0**-10),
    KvDType.FLOAT8_E5M2: (2.0**-3, 2.0**-17),
}


def mha_layouts(page_size: int = 4) -> list[KvLayout]:
    """Three layers, two KV heads of eight elements: every element type in every arrangement."""
    return [
        KvLayout(3, 2, 8, dtype, page_size, arrangement)
        for dtype in ELEMENT_TYPES
        for arrangement in KvArrangement
    ]


def mla_layouts(page_size: int = 4) -> list[MlaLayout]:
    """Three layers of a latent of 12 and a rotated part of 8 elements, in every element type."""
    return [MlaLayout(3, 12, 8, dtype, page_size) for dtype in ELEMENT_TYPES]


def all_layouts(page_size: int = 4) -> list[PagedLayout]:
    """Of every pool one."""
    return [*mha_layouts(page_size), *mla_layouts(page_size)]


def layout_name(layout: PagedLayout) -> str:
    """For test ids."""
    kind = layout.arrangement.value if isinstance(layout, KvLayout) else "mla"
    return f"{kind}-{layout.dtype.value}-{layout.page_size}"


def vectors_of(layout: PagedLayout, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The two vectors of some tokens, float32, magnitudes from 1e-3 to 1e2."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(layout, KvLayout):
        shapes = [(tokens, layout.num_kv_heads, layout.head_dim)] * 2
    else:
        assert isinstance(layout, MlaLayout)
        shapes = [(tokens, layout.kv_lora_rank), (tokens, layout.qk_rope_head_dim)]
    first, second = (
        torch.randn(shape, generator=generator)
        * 10 ** (torch.rand((*shape[:-1], 1), generator=generator) * 5 - 3)
        for shape in shapes
    )
    return first, second


def rounding_bound(dtype: KvDType, values: torch.Tensor) -> torch.Tensor:
    """Largest legal |stored - value| of each element of [..., D], float64."""
    size = values.double().abs()
    if dtype is KvDType.INT8:
        # Half a step, and what float32 loses in the quotient and the product.
        step = size.amax(dim=-1, keepdim=True) / 127
        return (step * (0.5 + 2.0**-15)).expand_as(size)
    relative, absolute = _ROUNDING[dtype]
    return size * relative + absolute
