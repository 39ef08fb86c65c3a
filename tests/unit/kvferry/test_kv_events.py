from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.ids import ExtraKey
from kvferry.kv_events import chain_hashes, chain_root, event_block_tokens, prompt_block_hashes

SHARED = ExtraKey("")


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


@pytest.mark.parametrize(
    ("page_size", "block"), [(1, 16), (3, 18), (4, 16), (16, 16), (17, 17), (64, 64)]
)
def test_a_block_is_the_smallest_multiple_of_the_page_that_is_large_enough(page_size, block):
    assert event_block_tokens(page_size) == block


def test_the_hash_is_what_its_description_says():
    root = chain_root(SHARED)
    assert (
        root.to_bytes(8, "little")
        == hashlib.blake2b(b"", digest_size=8, person=b"kvferry-root").digest()
    )
    first = hashlib.blake2b(root.to_bytes(8, "little"), digest_size=8)
    first.update(tokens(1, 2).astype("<i4").tobytes())
    assert chain_hashes(root, tokens(1, 2), 2) == [int.from_bytes(first.digest(), "little")]


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(1, 8), st.integers(0, 5))
def test_hashes_of_a_part_continue_those_of_the_start(ids, block_tokens, cut_blocks):
    prompt = tokens(*ids)
    whole = prompt_block_hashes(prompt, block_tokens, SHARED)
    assert len(whole) == len(ids) // block_tokens
    cut = min(cut_blocks, len(whole))
    parent = whole[cut - 1] if cut else chain_root(SHARED)
    assert chain_hashes(parent, prompt[cut * block_tokens :], block_tokens) == whole[cut:]


def test_a_hash_names_the_whole_prefix():
    one = prompt_block_hashes(tokens(1, 2, 3, 4), 2, SHARED)
    other = prompt_block_hashes(tokens(9, 2, 3, 4), 2, SHARED)
    assert one[1] != other[1], "the second block is equal, what is before it is not"


def test_different_extra_keys_share_nothing():
    assert prompt_block_hashes(tokens(1, 2), 2, SHARED) != prompt_block_hashes(
        tokens(1, 2), 2, ExtraKey("tenant")
    )


def test_tokens_of_any_integer_type_hash_alike():
    narrow = prompt_block_hashes(tokens(1, 2), 2, SHARED)
    wide = prompt_block_hashes(np.array([1, 2], dtype=np.int64), 2, SHARED)
    assert narrow == wide
