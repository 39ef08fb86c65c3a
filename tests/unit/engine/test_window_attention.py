"""Attention to the last tokens only, against float64, over rows that gave up what is before."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from engine.attention.chunk_kernel import KEY_TILE
from engine.attention.cpu import DECODE_QUERIES_MAX, CpuAttention
from engine.attention.metadata import build_attention_metadata
from engine.crew import Crew
from kvferry.config import KvDType
from mem_cache.layout import KvLayout
from tests.support.kv_pools import layout_name, mha_layouts
from tests.support.paged_kv import make_rows, poisoned_pool

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16
LONG = 256
"""Tokens of several parts of the work."""
WINDOWS = pytest.mark.parametrize("window", [2, 16, 17, 100, 5000])

MIXES = {
    "decodes": [(1, 5), (1, 128), (1, 129), (1, 64)],
    "first chunks": [(7, 7), (133, 133)],
    "later chunks": [(9, 160), (40, 41)],
    "mixed": [(1, 17), (20, 155), (1, 100), (DECODE_QUERIES_MAX + 1, 5), (3, 90)],
}


def _reference(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, prefix_len: int, window: int
) -> torch.Tensor:
    """[n, H, D] over [m, H_kv, D], in float64 and with nothing clever."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = keys.double(), values.double()
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    positions = prefix_len + torch.arange(len(queries))[:, None]
    others = torch.arange(len(keys))[None]
    seen = (others > positions - window) & (others <= positions)
    scores = torch.einsum("nhd,mhd->hnm", queries.double(), keys) / queries.shape[2] ** 0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
    return torch.einsum("hnm,mhd->nhd", weights, values)


def _check(
    mix: list[tuple[int, int]], layout: KvLayout, window: int, *, num_slots: int = 1024
) -> None:
    torch.manual_seed(1)
    page_size = layout.page_size
    # Reads as NaN where nobody wrote, the dummy slot included.
    pool = poisoned_pool(layout, num_slots)
    rows = make_rows(page_size, len(mix), num_slots=num_slots)
    stored = []
    for row, (count, length) in enumerate(mix, start=1):
        slots = torch.from_numpy(rows.read(row, 0, length))
        shape = (length, KV_HEADS, HEAD_DIM)
        pool.write(0, slots, 2 * torch.randn(shape), torch.randn(shape))
        stored.append(pool.read(0, slots))
        given_up = max(0, length - count - window + 1) // page_size * page_size
        rows.write(row, 0, np.zeros(given_up, dtype=np.int64))
    counts, lengths = [list(column) for column in zip(*mix, strict=True)]
    indices = list(range(1, len(mix) + 1))
    table = rows.req_to_token.numpy()
    metadata = build_attention_metadata(table, indices, counts, lengths, page_size)
    queries = 2 * torch.randn(sum(counts), HEADS, HEAD_DIM)
    out = CpuAttention(pool, Crew(1), window).plan(metadata).run(queries, 0)
    start = 0
    for row, (count, length) in enumerate(mix):
        part = slice(start, start + count)
        expected = _reference(queries[part], *stored[row], length - count, window)
        difference = (out[part].view(expected.shape).double() - expected).abs().max()
        assert difference < 1e-5, f"sequence {row}"
        start += count


@WINDOWS
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())
def test_equals_float64(mix: list[tuple[int, int]], page_size: int, window: int) -> None:
    _check(mix, KvLayout(1, KV_HEADS, HEAD_DIM, KvDType.FLOAT32, page_size), window)


@pytest.mark.parametrize("layout", mha_layouts(16), ids=layout_name)
def test_every_pool_is_read_from_the_window_on(layout: KvLayout) -> None:
    layout = dataclasses.replace(layout, num_layers=1, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    _check(MIXES["mixed"], layout, 37)


@pytest.mark.parametrize("window", [3, KEY_TILE - 5, KEY_TILE + LONG])
def test_chunks_of_many_tiles(window: int) -> None:
    length = KEY_TILE + LONG + 50
    layout = KvLayout(1, KV_HEADS, HEAD_DIM, KvDType.FLOAT32, 16)
    _check([(LONG + 20, length)], layout, window)


def test_a_window_of_everything_changes_no_bit() -> None:
    torch.manual_seed(2)
    layout = KvLayout(1, KV_HEADS, HEAD_DIM, KvDType.FLOAT32, 16)
    pool, rows = poisoned_pool(layout), make_rows(16, 2)
    for row in (1, 2):
        slots = torch.from_numpy(rows.read(row, 0, 200))
        pool.write(
            0, slots, torch.randn(200, KV_HEADS, HEAD_DIM), torch.randn(200, KV_HEADS, HEAD_DIM)
        )
    metadata = build_attention_metadata(rows.req_to_token.numpy(), [1, 2], [1, 30], [200, 200], 16)
    queries = torch.randn(31, HEADS, HEAD_DIM)
    plain = CpuAttention(pool, Crew(1)).plan(metadata).run(queries, 0)
    windowed = CpuAttention(pool, Crew(1), 200).plan(metadata).run(queries, 0)
    assert torch.equal(plain, windowed)
