import dataclasses

import pytest
import torch

from kvferry.config import KvArrangement, KvDType
from mem_cache.layout import KvLayout
from mem_cache.mha_pool import MHATokenToKVPool

LAYOUT = KvLayout(num_layers=3, num_kv_heads=2, head_dim=4, dtype=KvDType.FLOAT32, page_size=4)
HND = dataclasses.replace(LAYOUT, arrangement=KvArrangement.HND)


def test_nhd_is_k_and_v_by_slot():
    pool = MHATokenToKVPool(LAYOUT, num_slots=16)
    assert pool.buffer.shape == (3, 2, 20, 2, 4)
    k, v = pool.layer(1)
    assert k.shape == v.shape == (20, 2, 4)
    assert k.is_contiguous()
    assert v.is_contiguous()
    assert k.data_ptr() == pool.buffer[1, 0].data_ptr()
    assert v.data_ptr() == pool.buffer[1, 1].data_ptr()


def test_write_goes_to_the_slots_of_one_layer():
    pool = MHATokenToKVPool(LAYOUT, num_slots=16)
    k, v = torch.randn(2, 2, 4), torch.randn(2, 2, 4)
    pool.write(2, torch.tensor([9, 5]), k, v)
    assert pool.buffer[2, 0, 9].equal(k[0])
    assert pool.buffer[2, 1, 5].equal(v[1])
    assert int(pool.buffer.count_nonzero()) == 2 * 2 * 8


def test_hnd_is_head_by_head_within_a_page():
    """Page 2 holds slots 8..11; slot 9 is its token 1."""
    pool = MHATokenToKVPool(HND, num_slots=16)
    assert pool.buffer.shape == (3, 2, 5, 2, 4, 4)
    k, v = torch.randn(2, 2, 4), torch.randn(2, 2, 4)
    pool.write(2, torch.tensor([9, 5]), k, v)
    keys, values = pool.layer(2)
    for head in range(2):
        assert keys[2, head, 1].equal(k[0, head])
        assert values[1, head, 1].equal(v[1, head])
    assert int(pool.buffer.count_nonzero()) == 2 * 2 * 8


def test_a_write_of_a_view_that_is_not_contiguous():
    pool = MHATokenToKVPool(LAYOUT, num_slots=16)
    k = torch.randn(2, 3, 4).transpose(0, 1)
    pool.write(0, torch.tensor([4, 5, 6]), k, k[:1].expand(3, 2, 4))
    assert pool.buffer[0, 0, 4:7].equal(k)
    assert pool.buffer[0, 1, 6].equal(k[0])


@pytest.mark.parametrize(
    ("dtype", "arrangement", "expected"),
    [
        (KvDType.FLOAT32, KvArrangement.NHD, torch.float32),
        (KvDType.BFLOAT16, KvArrangement.NHD, torch.bfloat16),
        (KvDType.FLOAT32, KvArrangement.HND, None),
        (KvDType.INT8, KvArrangement.NHD, None),
    ],
)
def test_only_plain_tensors_by_slot_are_used_in_place(dtype, arrangement, expected):
    layout = dataclasses.replace(LAYOUT, dtype=dtype, arrangement=arrangement)
    assert MHATokenToKVPool(layout, num_slots=16).in_place_dtype == expected


def test_slots_are_whole_pages():
    with pytest.raises(AssertionError, match="whole pages"):
        MHATokenToKVPool(LAYOUT, num_slots=15)
