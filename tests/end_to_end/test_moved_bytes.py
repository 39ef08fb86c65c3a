"""Only missing tokens move: in a conversation that is what the user says, counted in bytes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.support.chat import ANSWER_TOKENS, SAID, chat

PAGE_SIZES = [
    pytest.param(1, marks=pytest.mark.slow),
    16,
    pytest.param(64, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_the_bytes_that_move_are_those_of_the_new_tokens(page_size: int) -> None:
    told = chat(page_size, "never")
    assert len(told.turns) == len(SAID) == 5
    for turn in told.turns:
        usage = turn.usage
        # The last token of an answer is never fed back: its KV is computed with the next prompt.
        new_tokens = len(turn.prompt) - max(0, turn.known - 1)
        rounding = usage.moved_tokens - new_tokens
        assert 0 <= rounding < page_size
        assert usage.decode_hit_tokens + usage.moved_tokens == len(turn.prompt)
        assert usage.decode_hit_tokens % page_size == 0
        assert usage.moved_bytes == usage.moved_tokens * told.bytes_per_token
    moved = sum(turn.usage.moved_bytes for turn in told.turns)
    assert moved == told.prefill["bytes_sent"] == told.decode["bytes_received"]
    # Nothing went back.
    assert told.decode.get("bytes_sent", 0) == told.prefill.get("bytes_received", 0) == 0
    assert told.decode.get("offers_sent", 0) == 0


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_an_answer_that_the_prefill_worker_computes_again_does_not_move(page_size: int) -> None:
    told = chat(page_size, "never")
    for before, turn in pairwise(told.turns):
        # It had the last prompt and computes the answer like everything after it...
        had = len(before.prompt) // page_size * page_size
        assert turn.usage.prefill_hit_tokens == had
        # ...but the decode worker has that, so sending resumes behind it.
        resumed_at = len(turn.prompt) - turn.usage.moved_tokens
        assert resumed_at > len(before.prompt) + ANSWER_TOKENS - 1 - page_size
