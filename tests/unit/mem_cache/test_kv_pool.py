import dataclasses

import pytest

from kvferry.config import KvDType
from kvferry.errors import ConfigError
from mem_cache.kv_pool import slots_for_budget
from mem_cache.layout import KvLayout, MlaLayout
from tests.support.kv_pools import ELEMENT_TYPES, layout_name

LAYOUT = KvLayout(num_layers=3, num_kv_heads=2, head_dim=4, dtype=KvDType.FLOAT32, page_size=4)
SMOL = KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, dtype=KvDType.FLOAT32, page_size=16)


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


@pytest.mark.parametrize(
    "layout",
    [
        *(dataclasses.replace(SMOL, dtype=dtype) for dtype in ELEMENT_TYPES),
        MlaLayout(61, 512, 64, KvDType.BFLOAT16, 16),
    ],
    ids=layout_name,
)
def test_a_budget_holds_exactly_as_many_tokens_as_its_bytes(layout):
    budget = 10**9
    slots = slots_for_budget(budget, layout, rows=64, context_length=8192)
    used = 4 * 65 * 8192 + (16 + slots) * layout.bytes_per_token
    assert used <= budget < used + 16 * layout.bytes_per_token
