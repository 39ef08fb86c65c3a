"""Steps as FlashInfer's wrappers are told of them, on a strict stand-in, against the CPU's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from engine.attention.cpu import CpuAttention
from engine.attention.flashinfer import (
    FlashInferAttention,
    PagedHeads,
    StaticDecodeAttention,
    rows_of,
    sequences_of,
)
from engine.attention.metadata import build_attention_metadata
from engine.crew import Crew
from engine.flashinfer_library import load_flashinfer
from kvferry.config import KvArrangement, KvDType
from kvferry.errors import ConfigError
from mem_cache.layout import KvLayout
from tests.support import fake_flashinfer
from tests.support.fake_flashinfer import ContractError
from tests.support.paged_kv import make_rows, poisoned_pool

if TYPE_CHECKING:
    from engine.attention.metadata import AttentionMetadata
    from mem_cache.kv_pool import KvPool

HEAD_DIM = 64
TYPES = {KvDType.FLOAT16: torch.float16, KvDType.BFLOAT16: torch.bfloat16}
MIXES = {
    "decodes": [(1, 5), (1, 33), (1, 16), (1, 1)],
    "chunks": [(7, 7), (20, 41)],
    "mixed": [(1, 17), (9, 30), (1, 40), (5, 5), (2, 19)],
}


def _layout(page_size: int, **others: Any) -> KvLayout:
    values = {"num_kv_heads": 2, "head_dim": HEAD_DIM, "dtype": KvDType.BFLOAT16}
    return KvLayout(num_layers=2, page_size=page_size, **(values | others))


def _heads(pool: KvPool, query_heads: int) -> PagedHeads:
    dtype = pool.buffer.dtype
    workspace = torch.empty(64, dtype=torch.uint8)
    return PagedHeads(fake_flashinfer, pool, query_heads, dtype, workspace)


def _metadata(mix: list[tuple[int, int]], pool: KvPool) -> AttentionMetadata:
    """Sequences of (new tokens, tokens) whose keys and values are random, in both layers."""
    page_size = pool.layout.page_size
    rows = make_rows(page_size, len(mix))
    for row, (_, length) in enumerate(mix, start=1):
        slots = torch.from_numpy(rows.read(row, 0, length))
        shape = (length, pool.layout.heads, pool.layout.head_dim)
        for layer in range(2):
            pool.write(layer, slots, 2 * torch.randn(shape), torch.randn(shape))
    counts, lengths = ([*column] for column in zip(*mix, strict=True))
    indices = range(1, len(mix) + 1)
    return build_attention_metadata(rows.req_to_token.numpy(), indices, counts, lengths, page_size)


def _queries(metadata: AttentionMetadata, heads: int, dtype: torch.dtype) -> torch.Tensor:
    return (2 * torch.randn(int(metadata.qo_indptr[-1]), heads, HEAD_DIM)).to(dtype)


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_equals_the_cpu(mix: list[tuple[int, int]], page_size: int, window: int | None) -> None:
    _check(mix, _layout(page_size), 6, window)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("arrangement", KvArrangement)
def test_every_arrangement_and_group(
    kv_heads: int, dtype: KvDType, arrangement: KvArrangement
) -> None:
    layout = _layout(4, num_kv_heads=kv_heads, dtype=dtype, arrangement=arrangement)
    _check(MIXES["mixed"], layout, 6, None)


def _check(
    mix: list[tuple[int, int]], layout: KvLayout, query_heads: int, window: int | None
) -> None:
    torch.manual_seed(0)
    pool = poisoned_pool(layout)
    metadata = _metadata(mix, pool)
    metadata.check_invariants(1024 // layout.page_size + 1)
    dtype = TYPES[layout.dtype]
    queries = _queries(metadata, query_heads, dtype)
    before = queries.clone()
    plan = FlashInferAttention(_heads(pool, query_heads), window).plan(metadata)
    expected = CpuAttention(pool, Crew(1), window).plan(metadata)
    for layer in range(2):
        found = plan.run(queries, layer)
        assert found.shape == (len(queries), query_heads * HEAD_DIM)
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected.run(queries, layer), atol=2e-2, rtol=2e-2)
    assert torch.equal(queries, before)


def test_a_static_backend_is_told_of_steps_of_its_size() -> None:
    torch.manual_seed(0)
    pool = poisoned_pool(_layout(4))
    metadata = _metadata(MIXES["decodes"], pool)
    queries = _queries(metadata, 4, torch.bfloat16)
    static = StaticDecodeAttention(_heads(pool, 4), 7, sequences=4, pages_max=20)
    expected = FlashInferAttention(_heads(pool, 4), 7).plan(metadata).run(queries, 1)
    assert torch.equal(static.plan(metadata).run(queries, 1), expected)
    few = sequences_of(metadata, np.asarray([0, 2]))
    with pytest.raises(ContractError, match="another size"):
        static.plan(few)
    small = StaticDecodeAttention(_heads(pool, 4), 7, sequences=4, pages_max=5)
    with pytest.raises(ContractError, match="more pages"):
        small.plan(metadata)


def test_parts_of_a_step() -> None:
    pool = poisoned_pool(_layout(4))
    metadata = _metadata(MIXES["mixed"], pool)
    chosen = np.asarray([1, 3, 4])
    part = sequences_of(metadata, chosen)
    part.check_invariants(1024 // 4 + 1)
    assert part.query_lengths.tolist() == [9, 5, 2]
    assert part.kv_lengths.tolist() == [30, 5, 19]
    assert rows_of(metadata, chosen).tolist() == [*range(1, 10), *range(11, 18)]
    pages = [metadata.kv_indices[slice(*metadata.kv_indptr[i : i + 2])] for i in chosen]
    assert part.kv_indices.tolist() == np.concatenate(pages).tolist()


@pytest.mark.parametrize(
    ("others", "dtype", "field"),
    [
        ({"head_dim": 80}, torch.bfloat16, "model.path"),
        ({"dtype": KvDType.FLOAT32}, torch.float32, "model.dtype"),
        ({"dtype": KvDType.INT8}, torch.bfloat16, "cache.dtype"),
        ({"dtype": KvDType.FLOAT8_E4M3}, torch.float16, "cache.dtype"),
    ],
)
def test_what_has_no_kernel_is_refused(
    others: dict[str, Any], dtype: torch.dtype, field: str
) -> None:
    pool = poisoned_pool(_layout(4, **others))
    with pytest.raises(ConfigError) as caught:
        PagedHeads(fake_flashinfer, pool, 4, dtype, torch.empty(64, dtype=torch.uint8))
    assert caught.value.field == field


def test_without_flashinfer_the_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "flashinfer", None)
    with pytest.raises(ConfigError, match="flashinfer-python") as caught:
        load_flashinfer()
    assert caught.value.field == "model.device"


def test_the_stand_in_refuses_what_a_kernel_would_misread() -> None:
    torch.manual_seed(0)
    pool = poisoned_pool(_layout(4))
    heads = _heads(pool, 6)
    metadata = _metadata(MIXES["decodes"], pool)
    queries = _queries(metadata, 6, torch.bfloat16)
    wrapper = fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper(heads.workspace, "NHD")
    with pytest.raises(ContractError, match="plan comes before"):
        wrapper.run(queries, heads.pages(0))
    heads.plan_decode(wrapper, metadata, None)
    for wrong in (queries[:-1], queries.half(), queries.transpose(0, 1).contiguous()):
        with pytest.raises(ContractError):
            wrapper.run(wrong, heads.pages(0))
    with pytest.raises(ContractError, match="contiguous"):
        wrapper.run(queries.mT.contiguous().mT, heads.pages(0))
    with pytest.raises(ContractError, match="cache"):
        wrapper.run(queries, pool.layer(0))
    metadata.kv_last_page_len[1] = 5
    with pytest.raises(ContractError, match="last_page_len"):
        heads.plan_decode(wrapper, metadata, None)
