"""The configured element type and arrangement reach the workers; a handoff changes no answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvferry.config import load_config
from kvferry.membership import Role
from mem_cache.kv_pool import slots_for_budget
from mem_cache.layout import KvLayout, kv_dtype
from tests.support.in_process_cluster import InProcessCluster

if TYPE_CHECKING:
    from kvferry.config import ClusterConfig
    from tests.support.prompts import Prompt

ANSWER_TOKENS = 12


def _slots(config: ClusterConfig) -> int:
    """Of SmolLM2-135M: 30 layers of three KV heads of 64 elements."""
    dtype = kv_dtype(config.cache.dtype, config.model.dtype)
    layout = KvLayout(30, 3, 64, dtype, config.cache.page_size)
    return slots_for_budget(config.cache.memory_bytes, layout, config.cache.rows, 8192)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "arrangement"), [("int8", "hnd"), ("bfloat16", "nhd"), ("float8_e4m3", "hnd")]
)
def test_disaggregated_equals_aggregated(
    dtype: str, arrangement: str, prompts: list[Prompt]
) -> None:
    chosen = {"cache.dtype": dtype, "cache.arrangement": arrangement}
    config = load_config(None, {}, chosen)
    asked = [prompt.ids for prompt in prompts if prompt.name in ("length-65", "length-100")]
    assert len(asked) == 2
    with InProcessCluster(config, (Role.BOTH,)) as alone:
        expected = [alone.generate(ids, ANSWER_TOKENS).token_ids for ids in asked]
    with InProcessCluster(config, (Role.PREFILL, Role.DECODE)) as pair:
        assert [pair.generate(ids, ANSWER_TOKENS).token_ids for ids in asked] == expected
        totals = {accounts.total for accounts in pair.accounts().values()}
        assert totals == {_slots(config)}
        pair.wait_idle()
    assert all(len(answer) == ANSWER_TOKENS for answer in expected)
