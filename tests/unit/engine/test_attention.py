"""Attention over pages against float64, for every page size and mix of sequences."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from engine.attention.chunk_kernel import KEY_TILE
from engine.attention.cpu import DECODE_QUERIES_MAX, CpuAttention
from engine.attention.metadata import build_attention_metadata
from engine.crew import Crew
from kvferry.config import KvDType
from kvferry.errors import ConfigError
from mem_cache.layout import KvLayout
from tests.support.kv_pools import layout_name, mha_layouts
from tests.support.paged_kv import make_rows, poisoned_pool

if TYPE_CHECKING:
    from mem_cache.kv_pool import KvPool
    from mem_cache.req_to_token_pool import ReqToTokenPool

PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 4, 16, 64])
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16
LONG = 256
"""Tokens of several parts of the work."""
ALONE = Crew(1)

MIXES = {
    "one decode": [(1, 1)],
    "decodes": [(1, 5), (1, 128), (1, 129), (1, 64)],
    "first chunks": [(7, 7), (33, 33)],
    "later chunks": [(9, 60), (40, 41)],
    "short chunks": [(DECODE_QUERIES_MAX, 80), (2, 2)],
    "mixed": [(1, 17), (20, 55), (1, 100), (DECODE_QUERIES_MAX + 1, 5), (3, 90)],
}


def _reference(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, prefix_len: int
) -> torch.Tensor:
    """[n, H, D] over [m, H_kv, D], in float64 and with nothing clever."""
    group = queries.shape[1] // keys.shape[1]
    queries, keys, values = queries.double(), keys.double(), values.double()
    out = torch.empty_like(queries)
    for token in range(queries.shape[0]):
        seen = prefix_len + token + 1
        for head in range(queries.shape[1]):
            scores = keys[:seen, head // group] @ queries[token, head] / queries.shape[2] ** 0.5
            out[token, head] = scores.softmax(dim=0) @ values[:seen, head // group]
    return out


def _layout(page_size: int) -> KvLayout:
    return KvLayout(1, KV_HEADS, HEAD_DIM, KvDType.FLOAT32, page_size)


def _random_kv(pool: KvPool, rows: ReqToTokenPool, row: int, length: int) -> None:
    """Spread enough that the softmax is far from uniform."""
    assert isinstance(pool.layout, KvLayout)
    shape = (length, pool.layout.heads, pool.layout.head_dim)
    slots = torch.from_numpy(rows.read(row, 0, length))
    pool.write(0, slots, 2 * torch.randn(shape), torch.randn(shape))


def _check(
    mix: list[tuple[int, int]],
    layout: KvLayout,
    *,
    model_dtype: torch.dtype = torch.float32,
    crew: Crew = ALONE,
    tolerance: float = 1e-5,
    num_slots: int = 1024,
    heads: int = HEADS,
) -> None:
    """Against float64 over what the pool stores, however coarse: it must be read as it is."""
    torch.manual_seed(1)
    page_size = layout.page_size
    pool = poisoned_pool(layout, num_slots)
    rows = make_rows(page_size, len(mix), num_slots=num_slots)
    indices = list(range(1, len(mix) + 1))
    for row, (_, length) in zip(indices, mix, strict=True):
        _random_kv(pool, rows, row, length)
    counts, lengths = [list(column) for column in zip(*mix, strict=True)]
    metadata = build_attention_metadata(
        rows.req_to_token.numpy(), indices, counts, lengths, page_size
    )
    metadata.check_invariants(num_slots // page_size + 1)
    queries = (2 * torch.randn(sum(counts), heads, layout.head_dim)).to(model_dtype)
    out = CpuAttention(pool, crew).plan(metadata).run(queries, 0)
    assert out.shape == (sum(counts), heads * layout.head_dim)
    assert out.dtype == model_dtype
    start = 0
    for row, (count, length) in zip(indices, mix, strict=True):
        keys, values = pool.read(0, torch.from_numpy(rows.read(row, 0, length)))
        part = slice(start, start + count)
        expected = _reference(queries[part], keys, values, length - count)
        difference = (out[part].view(expected.shape).double() - expected).abs().max()
        assert difference < tolerance, f"sequence {row}"
        start += count


@PAGE_SIZES
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())
def test_equals_float64(mix: list[tuple[int, int]], page_size: int) -> None:
    _check(mix, _layout(page_size))


@pytest.mark.parametrize("layout", [*mha_layouts(1), *mha_layouts(16)], ids=layout_name)
@pytest.mark.parametrize("mix", ["decodes", "mixed"])
def test_every_pool_is_read_as_it_is(mix: str, layout: KvLayout) -> None:
    _check(MIXES[mix], dataclasses.replace(layout, num_layers=1, head_dim=HEAD_DIM))


@pytest.mark.parametrize("layout", mha_layouts(4), ids=layout_name)
def test_model_and_pool_may_differ_in_dtype(layout: KvLayout) -> None:
    """Only the answer is rounded: outputs are below 4, bfloat16 spaces those by 2^-6."""
    _check(
        MIXES["mixed"],
        dataclasses.replace(layout, num_layers=1, head_dim=HEAD_DIM),
        model_dtype=torch.bfloat16,
        tolerance=2**-7 + 1e-5,
    )


@pytest.mark.parametrize("layout", mha_layouts(4), ids=layout_name)
def test_coarse_kv_changes_attention_by_no_more_than_its_rounding(layout: KvLayout) -> None:
    """Scores move by at most e, so weights by a factor within e^(+-2e), and values by their own.

    So no output moves by more than max(dV) + (e^(2e) - 1) * max(V), e = max(abs(q * dK)) / sqrt(D).
    """
    torch.manual_seed(3)
    layout = dataclasses.replace(layout, num_layers=1, head_dim=HEAD_DIM)
    length = 70
    pool, rows = poisoned_pool(layout), make_rows(4, 1)
    keys, values = torch.randn(2, length, 2, HEAD_DIM)
    slots = torch.from_numpy(rows.read(1, 0, length))
    pool.write(0, slots, keys, values)
    metadata = build_attention_metadata(rows.req_to_token.numpy(), [1], [1], [length], 4)
    queries = torch.randn(1, HEADS, HEAD_DIM)
    out = CpuAttention(pool, ALONE).plan(metadata).run(queries, 0).view(HEADS, HEAD_DIM)
    exact = _reference(queries, keys, values, length - 1)[0]
    read_keys, read_values = pool.read(0, slots)
    for head in range(HEADS):
        group = head // (HEADS // 2)
        moved = (read_keys - keys)[:, group].double() @ queries[0, head].double()
        e = float(moved.abs().max()) / HEAD_DIM**0.5
        by_values = float((read_values - values)[:, group].abs().max())
        bound = by_values + float(values[:, group].abs().max()) * np.expm1(2 * e)
        assert (out[head].double() - exact[head]).abs().max() <= bound + 1e-5


def test_chunks_longer_than_the_tiles() -> None:
    count, prefix = LONG + 5, KEY_TILE - 3
    _check([(count, count + prefix)], _layout(16))
    _check([(count, count + prefix)], dataclasses.replace(_layout(16), dtype=KvDType.INT8))


@pytest.mark.slow
def test_two_threads_equal_float64() -> None:
    with closing(Crew(2)) as crew:
        _check(MIXES["mixed"], _layout(16), crew=crew)
        _check(MIXES["mixed"], dataclasses.replace(_layout(16), dtype=KvDType.INT8), crew=crew)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(9, 3, 64), (8, 8, 80), (8, 2, 128), (14, 2, 20), (8, 1, 96)],
)
def test_groups_and_widths(heads: int, kv_heads: int, head_dim: int) -> None:
    """Groups of 1, 3, 4, 7 and 8; widths of whole panels, whole vectors, and neither."""
    layout = KvLayout(1, kv_heads, head_dim, KvDType.FLOAT32, 16)
    mix = [(1, 300), (3, 200), (1, 1), (40, 130)]
    _check(mix, layout, heads=heads, num_slots=2048)


def _outputs(
    mix: list[tuple[int, int]], tokens: list[slice], crew: Crew, window: int | None
) -> torch.Tensor:
    """Sequence i of always the same KV, with the last queries that `mix` says, all in one step."""
    generator = torch.Generator().manual_seed(4)
    layout = KvLayout(1, KV_HEADS, HEAD_DIM, KvDType.FLOAT32, 16)
    pool, rows = poisoned_pool(layout), make_rows(16, 2)
    queries = 2 * torch.randn(2, 512, HEADS, HEAD_DIM, generator=generator)
    for row in (1, 2):
        kv = 2 * torch.randn(2, 512, KV_HEADS, HEAD_DIM, generator=generator)
        pool.write(0, torch.from_numpy(rows.read(row, 0, 512)), kv[0], kv[1])
    counts, lengths = [list(column) for column in zip(*mix, strict=True)]
    indices = list(range(1, len(mix) + 1))
    metadata = build_attention_metadata(rows.req_to_token.numpy(), indices, counts, lengths, 16)
    asked = [queries[i, length - count : length] for i, (count, length) in enumerate(mix)]
    out = CpuAttention(pool, crew, window).plan(metadata).run(torch.cat(asked), 0)
    return torch.cat([out[part] for part in tokens])


@pytest.mark.parametrize("window", [None, 150])
def test_no_bit_depends_on_the_batch_or_the_cut_or_the_threads(window: int | None) -> None:
    alone = _outputs([(1, 400)], [slice(0, 1)], ALONE, window)
    guessed = _outputs([(4, 403), (1, 5)], [slice(0, 1)], ALONE, window)
    assert torch.equal(alone, guessed)
    chunk = _outputs([(200, 400)], [slice(100, 200)], ALONE, window)
    with closing(Crew(2)) as crew:
        assert torch.equal(_outputs([(1, 400), (90, 100)], [slice(0, 1)], crew, window), alone)
        assert torch.equal(_outputs([(100, 400)], [slice(0, 100)], crew, window), chunk)


def test_scores_are_capped() -> None:
    """As c tanh(x / c), for a decoded token and in a chunk."""
    torch.manual_seed(5)
    pool, rows = poisoned_pool(_layout(16)), make_rows(16, 2)
    for row in (1, 2):
        _random_kv(pool, rows, row, 200)
    metadata = build_attention_metadata(rows.req_to_token.numpy(), [1, 2], [1, 20], [200, 200], 16)
    queries = 4 * torch.randn(21, HEADS, HEAD_DIM)
    out = CpuAttention(pool, ALONE, score_cap=5.0).plan(metadata).run(queries, 0)
    for row, token, seen in ((1, 0, 200), (2, 1, 181), (2, 20, 200)):
        keys, values = pool.read(0, torch.from_numpy(rows.read(row, 0, seen)))
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            scores = keys[:, kv_head].double() @ queries[token, head].double() / HEAD_DIM**0.5
            expected = (5 * (scores / 5).tanh()).softmax(dim=0) @ values[:, kv_head].double()
            part = out[token].view(HEADS, HEAD_DIM)[head].double()
            assert (part - expected).abs().max() < 1e-5


def test_heads_narrower_than_a_register_are_refused() -> None:
    pool = poisoned_pool(KvLayout(1, 1, 4, KvDType.FLOAT32, 1))
    with pytest.raises(ConfigError, match="model"):
        CpuAttention(pool, ALONE)


def test_large_scores_do_not_overflow() -> None:
    pool = poisoned_pool(KvLayout(1, 1, 8, KvDType.FLOAT32, 1))
    rows = make_rows(1, 1)
    slots = torch.from_numpy(rows.read(1, 0, 3))
    pool.write(0, slots, torch.tensor([-300.0, 300.0, 0.0]).view(3, 1, 1).expand(3, 1, 8),
               torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1).expand(3, 1, 8))  # fmt: skip
    metadata = build_attention_metadata(rows.req_to_token.numpy(), [1], [1], [3], 1)
    plan = CpuAttention(pool, ALONE).plan(metadata)
    out = plan.run(torch.full((1, 1, 8), 300.0), 0)
    assert torch.equal(out, torch.full((1, 8), 2.0))


def test_metadata_of_the_worked_example() -> None:
    """Two sequences at page size 4: six tokens on pages 25 and 7, five on pages 25 and 3."""
    table = np.zeros((3, 8), dtype=np.int32)
    table[1, :8] = [100, 101, 102, 103, 28, 29, 30, 31]
    table[2, :8] = [100, 101, 102, 103, 12, 13, 14, 15]
    metadata = build_attention_metadata(table, [1, 2], [2, 1], [6, 5], 4)
    assert metadata.qo_indptr.tolist() == [0, 2, 3]
    assert metadata.kv_indptr.tolist() == [0, 2, 4]
    assert metadata.kv_indices.tolist() == [25, 7, 25, 3]
    assert metadata.kv_last_page_len.tolist() == [2, 1]
    assert metadata.kv_lengths.tolist() == [6, 5]
    assert metadata.query_lengths.tolist() == [2, 1]


def test_metadata_of_full_pages() -> None:
    table = np.arange(4, 24, dtype=np.int32).reshape(1, 20)
    metadata = build_attention_metadata(table, [0, 0], [1, 8], [4, 8], 4)
    assert metadata.kv_last_page_len.tolist() == [4, 4]
    assert metadata.kv_indices.tolist() == [1, 1, 2]


def test_metadata_invariants_notice_the_dummy_page() -> None:
    table = np.zeros((2, 8), dtype=np.int32)
    metadata = build_attention_metadata(table, [1], [1], [3], 4)
    with pytest.raises(AssertionError):
        metadata.check_invariants(10)
