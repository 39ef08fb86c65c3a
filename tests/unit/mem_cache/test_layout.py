import dataclasses

import pytest

from kvferry.config import DType, KvArrangement, KvDType
from kvferry.errors import ConfigError
from mem_cache.layout import KvLayout, KvPart, kv_dtype

SMOL = KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, dtype=KvDType.FLOAT32, page_size=16)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (KvDType.FLOAT32, 46_080),
        (KvDType.FLOAT16, 23_040),
        (KvDType.BFLOAT16, 23_040),
        (KvDType.FLOAT8_E4M3, 11_520),
        (KvDType.FLOAT8_E5M2, 11_520),
        (KvDType.INT8, 12_240),
    ],
)
def test_bytes_per_token_of_smollm2(dtype, expected):
    assert dataclasses.replace(SMOL, dtype=dtype).bytes_per_token == expected


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 31},
        {"num_kv_heads": 2},
        {"head_dim": 32},
        {"dtype": KvDType.FLOAT16},
        {"dtype": KvDType.BFLOAT16},
        {"dtype": KvDType.INT8},
        {"dtype": KvDType.FLOAT8_E4M3},
        {"dtype": KvDType.FLOAT8_E5M2},
    ],
)
def test_identities_differ_where_bytes_do(change):
    other = dataclasses.replace(SMOL, **change)
    assert other.exchange_hash() != SMOL.exchange_hash()
    assert other.page_hash != SMOL.page_hash


def test_identities_are_functions_of_the_values():
    # Pinned: two builds must agree on them, or no handoff between them would start and no file
    # of the one would be found by the other.
    assert SMOL.exchange_hash() == "ce60d772aedfa4bf"
    assert SMOL.page_hash == "0bf6df7c5c66509f"
    assert dataclasses.replace(SMOL).exchange_hash() == SMOL.exchange_hash()


def test_kv_of_different_models_is_not_exchanged():
    hashes = {SMOL.exchange_hash(model=model) for model in ("", "a-float32", "a-float32-int8")}
    assert len(hashes) == 3


def test_pages_are_not_exchanged_but_kept_in_files():
    other = dataclasses.replace(SMOL, page_size=1)
    assert other.exchange_hash() == SMOL.exchange_hash()
    assert other.page_hash != SMOL.page_hash


def test_ranks_share_the_heads_of_a_worker():
    halves = dataclasses.replace(SMOL, num_kv_heads=2)
    assert halves.exchange_hash(ranks=3) == dataclasses.replace(SMOL, num_kv_heads=6).exchange_hash(
        ranks=1
    )
    assert halves.exchange_hash(ranks=3) == SMOL.exchange_hash(ranks=2)
    assert halves.exchange_hash(ranks=2) != SMOL.exchange_hash(ranks=2)


def test_whole_is_every_layer_and_head():
    assert SMOL.whole == KvPart(0, 30, 0, 3)
    assert (SMOL.whole.layers, SMOL.whole.heads) == (30, 3)


@pytest.mark.parametrize("part", [(2, 1, 0, 1), (-1, 1, 0, 1), (0, 1, 2, 1), (0, 1, -1, 1)])
def test_a_part_is_in_order(part):
    with pytest.raises(AssertionError, match="no such"):
        KvPart(*part)


def test_rounding_to_pages():
    assert [SMOL.round_up(n) for n in (0, 1, 16, 17)] == [0, 16, 16, 32]
    assert [SMOL.round_down(n) for n in (0, 15, 16, 31)] == [0, 0, 16, 16]


def test_sizes_are_positive():
    with pytest.raises(AssertionError, match="positive"):
        dataclasses.replace(SMOL, page_size=0)


def test_arrangement_is_not_exchanged():
    turned = dataclasses.replace(SMOL, arrangement=KvArrangement.HND)
    assert turned.exchange_hash() == SMOL.exchange_hash()
    assert turned.page_hash == SMOL.page_hash


@pytest.mark.parametrize("model", list(DType))
def test_kv_has_the_dtype_of_the_model_unless_configured(model):
    assert kv_dtype(KvDType.AUTO, model).value == model.value
    assert kv_dtype(KvDType.INT8, model) is KvDType.INT8


def test_a_dtype_is_decided():
    with pytest.raises(AssertionError, match="other than AUTO"):
        dataclasses.replace(SMOL, dtype=KvDType.AUTO)


def test_int8_needs_whole_words_and_says_which_setting_to_change():
    with pytest.raises(ConfigError, match=r"cache\.dtype.*int8.*62 elements"):
        dataclasses.replace(SMOL, dtype=KvDType.INT8, head_dim=62)
    assert dataclasses.replace(SMOL, head_dim=62).bytes_per_token == 30 * 2 * 3 * 62 * 4
