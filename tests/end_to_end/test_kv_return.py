"""KV return with the real model: the answer is not computed twice, and nothing else changes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.end_to_end.test_moved_bytes import PAGE_SIZES
from tests.support.chat import ANSWER_TOKENS, chat


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_the_prefill_worker_computes_what_the_user_says_and_no_more(page_size: int) -> None:
    told, plain = chat(page_size, "always"), chat(page_size, "never")
    assert [turn.answer for turn in told.turns] == [turn.answer for turn in plain.turns]
    for before, turn in pairwise(told.turns):
        # The KV of the answer's last token does not exist: it is computed with the user's.
        had = (len(before.prompt) + ANSWER_TOKENS - 1) // page_size * page_size
        assert turn.usage.prefill_hit_tokens == had
        assert turn.usage.decode_hit_tokens == had
    spared = sum(turn.usage.prefill_hit_tokens for turn in told.turns)
    assert spared > sum(turn.usage.prefill_hit_tokens for turn in plain.turns)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_each_token_moves_once_whichever_way(page_size: int) -> None:
    told, plain = chat(page_size, "always"), chat(page_size, "never")
    assert told.decode["bytes_received"] == told.prefill["bytes_sent"]
    assert told.prefill["bytes_received"] == told.decode["bytes_sent"]
    # Forth go the same tokens as without a return.
    forth = told.prefill["bytes_sent"] // told.bytes_per_token
    assert told.prefill["bytes_sent"] == plain.prefill["bytes_sent"]
    back = told.decode["bytes_sent"] // told.bytes_per_token
    ends = [len(turn.prompt) for turn in told.turns]
    # Back goes each answer, from the last whole page of its prompt to the last one that is full.
    assert back == sum(
        (end + ANSWER_TOKENS - 1) // page_size * page_size - end // page_size * page_size
        for end in ends
    )
    everything = ends[-1] + ANSWER_TOKENS - 1
    if page_size == 1:
        assert forth + back == everything
    assert forth + back <= everything + 2 * len(ends) * (page_size - 1)
