"""Host pages hold what the device's pool holds, for every pool there is."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from kvferry.config import KvArrangement, KvDType
from mem_cache.host_pool import HostPool
from mem_cache.layout import KvLayout, MlaLayout
from mem_cache.pool_choice import build_kv_pool

SIZE = 4
DTYPES = [dtype for dtype in KvDType if dtype is not KvDType.AUTO]
LAYOUTS = {
    f"{dtype.value} {arrangement.value}": KvLayout(3, 2, 4, dtype, SIZE, arrangement)
    for dtype, arrangement in product(DTYPES, KvArrangement)
} | {"latent": MlaLayout(3, 6, 2, KvDType.FLOAT32, SIZE)}
PLAIN = LAYOUTS["float32 nhd"]

every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def _wanted() -> bool:
    return False


def _filled(layout, seed):
    """A pool of random bytes, and 9 pages of its slots in disorder."""
    pool = build_kv_pool(layout, 40 * SIZE)
    generator = torch.Generator().manual_seed(seed)
    raw = pool.buffer.view(torch.uint8)
    raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))
    return pool, _slots(seed)


def _slots(seed):
    pages = 1 + np.random.default_rng(seed).permutation(40)[:9]
    return (pages[:, None] * SIZE + np.arange(SIZE)).ravel()


def _payload(pool, slots):
    whole = pool.layout.whole
    out = torch.empty(pool.payload_bytes(len(slots), whole), dtype=torch.uint8)
    pool.gather(slots, whole, out)
    return out


@every_layout
@pytest.mark.parametrize("piece_bytes", [1, 1000, 2**20])
def test_there_and_back_is_byte_for_byte_the_same(layout, piece_bytes, monkeypatch):
    monkeypatch.setattr("mem_cache.host_pool.PIECE_BYTES", piece_bytes)
    pool, slots = _filled(layout, 1)
    host = HostPool(pool, 40 * SIZE)
    host_slots, others = _slots(2), _slots(3)
    host.store(slots, host_slots, _wanted)
    before = _payload(pool, slots)
    host.load(others, host_slots, _wanted)
    assert torch.equal(_payload(pool, others), before)


@every_layout
def test_a_page_is_the_payload_of_its_tokens(layout):
    pool, slots = _filled(layout, 1)
    host = HostPool(pool, 40 * SIZE)
    host_slots = _slots(2)
    host.store(slots, host_slots, _wanted)
    for index in range(9):
        page = host.page(int(host_slots[index * SIZE]))
        assert page.is_contiguous()
        assert torch.equal(page, _payload(pool, slots[index * SIZE : (index + 1) * SIZE]))


def test_other_slots_are_left_alone():
    pool, slots = _filled(PLAIN, 1)
    host = HostPool(pool, 40 * SIZE)
    host.store(slots, _slots(2), _wanted)
    everything = np.arange(SIZE, 41 * SIZE)
    rest = np.setdiff1d(everything, _slots(3))
    before = _payload(pool, rest)
    host.load(_slots(3), _slots(2), _wanted)
    assert torch.equal(_payload(pool, rest), before)


def test_a_cancelled_copy_stops_between_pieces(monkeypatch):
    monkeypatch.setattr("mem_cache.host_pool.PIECE_BYTES", 1)
    pool, slots = _filled(PLAIN, 1)
    host = HostPool(pool, 40 * SIZE)
    host.store(slots, _slots(2), _wanted)
    looks = iter([False, False, True])
    pool.buffer.zero_()
    host.load(slots, _slots(2), lambda: next(looks))
    copied = [
        bool(_payload(pool, slots[first : first + SIZE]).any()) for first in range(0, 36, SIZE)
    ]
    assert copied == [True, True] + [False] * 7


def test_lengths_must_agree():
    pool, slots = _filled(PLAIN, 1)
    with pytest.raises(AssertionError, match="36 slots and 32 host slots"):
        HostPool(pool, 40 * SIZE).store(slots, _slots(2)[:-SIZE], _wanted)
