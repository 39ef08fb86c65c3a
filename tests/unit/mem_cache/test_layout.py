import dataclasses

import pytest

from kvferry.config import DType
from mem_cache.layout import KvLayout

SMOL = KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, dtype=DType.FLOAT32, page_size=16)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(DType.FLOAT32, 46_080), (DType.FLOAT16, 23_040), (DType.BFLOAT16, 23_040)],
)
def test_bytes_per_token_of_smollm2(dtype, expected):
    assert dataclasses.replace(SMOL, dtype=dtype).bytes_per_token == expected


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 31},
        {"num_kv_heads": 2},
        {"head_dim": 32},
        {"dtype": DType.FLOAT16},
        {"dtype": DType.BFLOAT16},
        {"page_size": 1},
    ],
)
def test_layout_hash_differs_where_bytes_or_pages_do(change):
    assert dataclasses.replace(SMOL, **change).layout_hash != SMOL.layout_hash


def test_layout_hash_is_a_function_of_the_values():
    assert dataclasses.replace(SMOL).layout_hash == SMOL.layout_hash
    # Pinned: two builds must agree on it, or no handoff between them would start.
    assert SMOL.layout_hash == "0bf6df7c5c66509f"


def test_rounding_to_pages():
    assert [SMOL.round_up(n) for n in (0, 1, 16, 17)] == [0, 16, 16, 32]
    assert [SMOL.round_down(n) for n in (0, 15, 16, 31)] == [0, 0, 16, 16]


def test_sizes_are_positive():
    with pytest.raises(AssertionError, match="positive"):
        dataclasses.replace(SMOL, page_size=0)
