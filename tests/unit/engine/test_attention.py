"""Attention over pages against float64, for every page size and mix of sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.attention.cpu import DECODE_QUERIES_MAX, KEY_TILE, QUERY_TILE, CpuAttention
from engine.attention.metadata import build_attention_metadata
from kvferry.config import DType
from tests.support.paged_kv import make_pool, make_rows

PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 4, 16, 64])
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16

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


def _check(
    mix: list[tuple[int, int]],
    page_size: int,
    *,
    dtype: DType = DType.FLOAT32,
    threads: int = 1,
    tolerance: float = 1e-5,
    num_slots: int = 1024,
) -> None:
    torch.manual_seed(1)
    pool = make_pool(
        num_layers=1,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        page_size=page_size,
        num_slots=num_slots,
        dtype=dtype,
    )
    rows = make_rows(page_size, len(mix), num_slots=num_slots)
    keys, values = pool.layer(0)
    indices = list(range(1, len(mix) + 1))
    for row, (_, length) in zip(indices, mix, strict=True):
        slots = torch.from_numpy(rows.read(row, 0, length))
        shape = (length, KV_HEADS, HEAD_DIM)
        # Spread enough that the softmax is far from uniform.
        pool.write(
            0, slots, 2 * torch.randn(shape).to(pool.dtype), torch.randn(shape).to(pool.dtype)
        )
    counts, lengths = [list(column) for column in zip(*mix, strict=True)]
    metadata = build_attention_metadata(
        rows.req_to_token.numpy(), indices, counts, lengths, page_size
    )
    metadata.check_invariants(num_slots // page_size + 1)
    queries = (2 * torch.randn(sum(counts), HEADS, HEAD_DIM)).to(pool.dtype)
    out = CpuAttention(pool.dtype, threads).plan(metadata).run(queries, keys, values)
    assert out.shape == (sum(counts), HEADS * HEAD_DIM)
    start = 0
    for row, (count, length) in zip(indices, mix, strict=True):
        slots = torch.from_numpy(rows.read(row, 0, length))
        part = slice(start, start + count)
        expected = _reference(queries[part], keys[slots], values[slots], length - count)
        difference = (out[part].view(expected.shape).double() - expected).abs().max()
        assert difference < tolerance, f"sequence {row}"
        start += count


@PAGE_SIZES
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())
def test_equals_float64(mix: list[tuple[int, int]], page_size: int) -> None:
    _check(mix, page_size)


@PAGE_SIZES
def test_half_precision_goes_by_tiles(page_size: int) -> None:
    _check(MIXES["mixed"], page_size, dtype=DType.BFLOAT16, tolerance=0.02)


def test_chunks_longer_than_the_tiles() -> None:
    count, prefix = QUERY_TILE + 5, KEY_TILE - 3
    _check([(count, count + prefix)], 16)


@pytest.mark.slow
def test_two_threads_equal_float64() -> None:
    _check(MIXES["mixed"], 16, threads=2)


def test_large_scores_do_not_overflow() -> None:
    pool = make_pool(num_layers=1, num_kv_heads=1, head_dim=8, page_size=1)
    rows = make_rows(1, 1)
    keys, values = pool.layer(0)
    slots = torch.from_numpy(rows.read(1, 0, 3))
    pool.write(0, slots, torch.tensor([-300.0, 300.0, 0.0]).view(3, 1, 1).expand(3, 1, 8),
               torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1).expand(3, 1, 8))  # fmt: skip
    metadata = build_attention_metadata(rows.req_to_token.numpy(), [1], [1], [3], 1)
    plan = CpuAttention(torch.float32, 1).plan(metadata)
    out = plan.run(torch.full((1, 1, 8), 300.0), keys, values)
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
