import dataclasses

import numpy as np
import pytest
import torch

from kvferry.config import DType
from kvferry.errors import ConfigError
from mem_cache.kv_pool import MHATokenToKVPool, slots_for_budget
from mem_cache.layout import KvLayout

LAYOUT = KvLayout(num_layers=3, num_kv_heads=2, head_dim=4, dtype=DType.FLOAT32, page_size=4)
DTYPES = {
    DType.FLOAT32: torch.float32,
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
}


def _random_pool(dtype=DType.FLOAT32, seed=0):
    pool = MHATokenToKVPool(dataclasses.replace(LAYOUT, dtype=dtype), num_slots=16)
    generator = torch.Generator().manual_seed(seed)
    pool.buffer.copy_(torch.randn(pool.buffer.shape, generator=generator))
    return pool


def test_shape_and_dummy_page():
    pool = MHATokenToKVPool(LAYOUT, num_slots=16)
    assert pool.buffer.shape == (3, 2, 20, 2, 4)
    k, v = pool.layer(1)
    assert k.shape == v.shape == (20, 2, 4)
    assert k.is_contiguous()
    assert v.is_contiguous()
    assert k.data_ptr() == pool.buffer[1, 0].data_ptr()


def test_write_goes_to_the_slots_of_one_layer():
    pool = MHATokenToKVPool(LAYOUT, num_slots=16)
    k, v = torch.randn(2, 2, 4), torch.randn(2, 2, 4)
    pool.write(2, torch.tensor([9, 5]), k, v)
    assert pool.buffer[2, 0, 9].equal(k[0])
    assert pool.buffer[2, 1, 5].equal(v[1])
    assert int(pool.buffer.count_nonzero()) == 2 * 2 * 8


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize(("start", "stop"), [(0, 3), (1, 2), (1, 3), (2, 2)])
def test_gather_is_the_slots_of_each_layer_in_order(dtype, start, stop):
    pool = _random_pool(dtype)
    slots = np.asarray([17, 4, 5, 12, 11], dtype=np.int64)
    out = torch.full((4096,), 255, dtype=torch.uint8)
    used = pool.gather(slots, start, stop, out)
    assert used == pool.payload_bytes(5, start, stop)
    assert used == (stop - start) * 2 * 5 * 8 * DTYPES[dtype].itemsize
    expected = pool.buffer[start:stop][:, :, slots.tolist()]
    assert out[:used].view(DTYPES[dtype]).view(expected.shape).equal(expected)
    assert (out[used:] == 255).all()


@pytest.mark.parametrize("dtype", list(DType))
def test_scatter_undoes_gather_in_another_pool(dtype):
    source, sink = _random_pool(dtype, 1), _random_pool(dtype, 2)
    untouched = sink.buffer.clone()
    from_slots = np.asarray([4, 9, 18, 7], dtype=np.int64)
    to_slots = np.asarray([12, 6, 5, 19], dtype=np.int64)
    payload = torch.empty(1024, dtype=torch.uint8)
    used = source.gather(from_slots, 1, 3, payload)
    sink.scatter(to_slots, 1, 3, payload[:used])
    for here, there in zip(from_slots.tolist(), to_slots.tolist(), strict=True):
        assert sink.buffer[1:3, :, there].equal(source.buffer[1:3, :, here])
    others = [slot for slot in range(20) if slot not in to_slots]
    assert sink.buffer[:, :, others].equal(untouched[:, :, others])
    assert sink.buffer[0].equal(untouched[0])


def test_payload_must_fit():
    pool = _random_pool()
    slots = np.asarray([4, 5], dtype=np.int64)
    with pytest.raises(AssertionError, match="exceeds"):
        pool.gather(slots, 0, 3, torch.empty(16, dtype=torch.uint8))
    with pytest.raises(AssertionError, match="lacks"):
        pool.scatter(slots, 0, 3, torch.empty(16, dtype=torch.uint8))


def test_nothing_to_gather():
    pool = _random_pool()
    empty = np.empty(0, dtype=np.int64)
    out = torch.empty(16, dtype=torch.uint8)
    assert pool.gather(empty, 0, 3, out) == 0
    pool.scatter(empty, 0, 3, out)


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("spare", [0, 1, 191, 192, 12_287])
def test_budget_counts_row_table_and_dummy_page(page_size, spare):
    layout = dataclasses.replace(LAYOUT, page_size=page_size)
    width = -(-100 // page_size) * page_size
    least = 4 * 9 * width + (page_size + width) * layout.bytes_per_token
    slots = slots_for_budget(least + spare, layout, rows=8, context_length=100)
    assert slots % page_size == 0
    used = least + (slots - width) * layout.bytes_per_token
    assert used <= least + spare < used + page_size * layout.bytes_per_token


def test_budget_below_one_request_names_the_setting():
    least = 4 * 9 * 100 + 104 * LAYOUT.bytes_per_token
    assert slots_for_budget(least, LAYOUT, rows=8, context_length=100) == 100
    with pytest.raises(ConfigError, match=rf"cache\.memory_bytes.*need {least}"):
        slots_for_budget(least - 1, LAYOUT, rows=8, context_length=100)
    with pytest.raises(ConfigError, match=r"cache\.memory_bytes"):
        slots_for_budget(1, LAYOUT, rows=8, context_length=100)
