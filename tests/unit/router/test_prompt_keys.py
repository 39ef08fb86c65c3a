from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.ids import ExtraKey
from kvferry.kv_events import prompt_block_hashes
from router.prompt_keys import prompt_keys


@given(
    st.lists(st.integers(0, 2**31 - 1), max_size=200),
    st.sampled_from([1, 2, 15, 16, 17, 29, 30, 31, 62, 63, 64]),
    st.text(max_size=5),
)
def test_keys_are_the_hashes_that_workers_tell(ids, block_tokens, extra):
    """Blocks that end within, at and beyond the 128 bytes that are compressed together."""
    tokens, extra_key = np.array(ids, dtype=np.int32), ExtraKey(extra)
    expected = prompt_block_hashes(tokens, block_tokens, extra_key)
    assert prompt_keys(tokens, block_tokens, extra_key).tolist() == expected


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_tokens_of_any_integer_type_have_the_same_keys(dtype):
    tokens = np.arange(100, dtype=dtype)
    tokens.flags.writeable = False
    expected = prompt_block_hashes(np.arange(100, dtype=np.int32), 16, ExtraKey(""))
    assert prompt_keys(tokens, 16, ExtraKey("")).tolist() == expected
    assert prompt_keys(tokens[::2], 16, ExtraKey("")).size == 3
