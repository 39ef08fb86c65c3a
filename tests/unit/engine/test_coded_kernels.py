"""The kernel's decoding of every stored pattern is the codec's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.attention.cpu import CpuAttention
from engine.attention.metadata import build_attention_metadata
from engine.attention.vectors import FORMS
from engine.crew import Crew
from kvferry.config import KvArrangement, KvDType
from mem_cache.layout import KvLayout
from mem_cache.pool_choice import build_kv_pool
from tests.support.kv_pools import ELEMENT_TYPES

HEAD_DIM = 64
TOKENS = 1024
"""Times 64 elements: all patterns of 16 bits."""


def _patterns(dtype: KvDType) -> torch.Tensor:
    """uint8 [TOKENS, unit]: every pattern of up to 16 bits, or random ones of 32 bits."""
    generator = torch.Generator().manual_seed(0)
    match dtype:
        case KvDType.FLOAT32:
            return torch.randint(
                0, 256, (TOKENS, 4 * HEAD_DIM), generator=generator, dtype=torch.uint8
            )
        case KvDType.INT8:
            scales = 10 ** (torch.rand(TOKENS, 1, generator=generator) * 60 - 30)
            steps = torch.arange(TOKENS * HEAD_DIM).to(torch.uint8).view(TOKENS, HEAD_DIM)
            return torch.cat([scales.view(torch.uint8), steps], dim=1)
        case KvDType.FLOAT16 | KvDType.BFLOAT16:
            bits = torch.arange(2**16, dtype=torch.int32).to(torch.uint16)
            return bits.view(TOKENS, HEAD_DIM).view(torch.uint8)
        case _:
            return torch.arange(TOKENS * HEAD_DIM).to(torch.uint8).view(TOKENS, HEAD_DIM)


@pytest.mark.parametrize("arrangement", KvArrangement)
@pytest.mark.parametrize("dtype", ELEMENT_TYPES)
def test_attention_to_one_token_is_its_value(dtype: KvDType, arrangement: KvArrangement) -> None:
    """With one key the weight is 1, so V comes out as the kernel decoded it."""
    layout = KvLayout(1, 1, HEAD_DIM, dtype, 16, arrangement)
    pool = build_kv_pool(layout, TOKENS * 16)
    slots = np.arange(TOKENS, dtype=np.int64) * 16 + 16
    keys = torch.zeros(TOKENS, layout.unit_bytes, dtype=torch.uint8)
    pool.scatter(slots, layout.whole, torch.cat([keys, _patterns(dtype)]).view(-1))
    table = slots[:, None].astype(np.int32)
    ones = [1] * TOKENS
    metadata = build_attention_metadata(table, list(range(TOKENS)), ones, ones, 16)
    out = CpuAttention(pool, Crew(1)).plan(metadata).run(torch.ones(TOKENS, 1, HEAD_DIM), 0)
    _, values = pool.read(0, torch.from_numpy(slots))
    torch.testing.assert_close(out, values[:, 0], rtol=0, atol=0, equal_nan=True)


def test_every_format_has_a_number_of_its_own() -> None:
    assert set(FORMS) == set(ELEMENT_TYPES)
    assert len(set(FORMS.values())) == len(FORMS)
