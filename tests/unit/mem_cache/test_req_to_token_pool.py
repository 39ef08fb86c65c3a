from dataclasses import dataclass

import numpy as np
import pytest
import torch

from mem_cache.req_to_token_pool import ReqToTokenPool


@dataclass
class Holder:
    req_pool_idx: int | None = None
    req_generation: int = 0


def test_table_has_a_row_more_than_requests_and_row_0_is_never_given():
    pool = ReqToTokenPool(rows=3, context_length=8)
    assert pool.req_to_token.shape == (4, 8)
    assert pool.req_to_token.dtype == torch.int32
    rows = pool.alloc([Holder(), Holder(), Holder()])
    assert rows is not None
    assert sorted(rows) == [1, 2, 3]


def test_a_later_chunk_keeps_its_row():
    pool = ReqToTokenPool(rows=2, context_length=8)
    first = Holder()
    pool.alloc([first])
    row = first.req_pool_idx
    second = Holder()
    assert pool.alloc([first, second]) == [row, second.req_pool_idx]
    assert pool.num_free == 0
    assert pool.alloc([first, second]) == [row, second.req_pool_idx]


def test_too_few_rows_change_nothing():
    pool = ReqToTokenPool(rows=2, context_length=8)
    holders = [Holder(), Holder(), Holder()]
    assert pool.alloc(holders) is None
    assert [h.req_pool_idx for h in holders] == [None, None, None]
    assert pool.num_free == 2


def test_rows_come_from_the_tail_of_the_free_list():
    pool = ReqToTokenPool(rows=4, context_length=8)
    first, second = Holder(), Holder()
    pool.alloc([first, second])
    assert pool.free(first) == 1
    third = Holder()
    assert pool.alloc([third]) == [1]


def test_free_clears_the_request_and_makes_old_references_stale():
    pool = ReqToTokenPool(rows=1, context_length=8)
    holder = Holder()
    pool.alloc([holder])
    row, generation = holder.req_pool_idx, holder.req_generation
    assert row is not None
    assert pool.is_current(row, generation)
    pool.free(holder)
    assert holder.req_pool_idx is None
    assert not pool.is_current(row, generation)
    pool.alloc([Holder()])
    assert not pool.is_current(row, generation)


def test_generations_survive_clear():
    pool = ReqToTokenPool(rows=2, context_length=8)
    before = Holder()
    pool.alloc([before])
    row, generation = before.req_pool_idx, before.req_generation
    assert row is not None
    pool.clear()
    assert pool.num_free == 2
    after = Holder()
    assert pool.alloc([after]) == [row]
    assert after.req_generation > generation
    assert not pool.is_current(row, generation)
    with pytest.raises(AssertionError, match="check 6"):
        pool.free(before)


def test_free_without_a_row_is_our_bug():
    with pytest.raises(AssertionError, match="no row"):
        ReqToTokenPool(rows=1, context_length=8).free(Holder())


def test_host_and_device_see_the_same_row():
    pool = ReqToTokenPool(rows=2, context_length=8)
    pool.write(1, 2, np.asarray([7, 9], dtype=np.int64))
    assert pool.req_to_token[1].tolist() == [0, 0, 7, 9, 0, 0, 0, 0]
    read = pool.read(1, 2, 4)
    assert read.dtype == np.int64
    pool.write(1, 2, np.asarray([1, 1], dtype=np.int64))
    assert read.tolist() == [7, 9]


@pytest.mark.parametrize(("row", "start"), [(0, 0), (3, 0), (1, 7)])
def test_writes_stay_within_rows_and_context(row, start):
    pool = ReqToTokenPool(rows=2, context_length=8)
    with pytest.raises(AssertionError):
        pool.write(row, start, np.asarray([1, 2], dtype=np.int64))


def test_a_row_beyond_the_table_is_not_current():
    pool = ReqToTokenPool(rows=2, context_length=8)
    assert not pool.is_current(0, 0)
    assert not pool.is_current(3, 0)
