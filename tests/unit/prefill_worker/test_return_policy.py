from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.config import KvReturn
from prefill_worker.return_policy import ReturnFacts, is_worth_fetching

ANSWER = ReturnFacts(
    missing_tokens=256,
    room_tokens=10_000,
    bytes_per_token=46_080,
    link_bytes_per_s=1e9,
    prefill_tokens_per_s=400.0,
)
"""0.64 s to compute, 17 ms to fetch."""


def test_an_answer_is_fetched_where_that_is_faster():
    assert is_worth_fetching(KvReturn.AUTO, ANSWER)
    # 11.8 MB at 30 MB/s are 0.39 s: more than half of what computing takes.
    assert not is_worth_fetching(KvReturn.AUTO, replace(ANSWER, link_bytes_per_s=3e7))
    # 256 tokens at 20,000 a second are 13 ms.
    assert not is_worth_fetching(KvReturn.AUTO, replace(ANSWER, prefill_tokens_per_s=2e4))


def test_a_few_tokens_are_not_worth_a_handoff():
    assert not is_worth_fetching(KvReturn.AUTO, replace(ANSWER, missing_tokens=2))
    assert is_worth_fetching(KvReturn.AUTO, replace(ANSWER, missing_tokens=16))


def test_what_was_never_measured_is_assumed():
    unknown = replace(ANSWER, link_bytes_per_s=0.0, prefill_tokens_per_s=0.0)
    assert is_worth_fetching(KvReturn.AUTO, unknown)


def test_always_asks_for_room_only():
    slow = replace(ANSWER, link_bytes_per_s=1.0)
    assert is_worth_fetching(KvReturn.ALWAYS, slow)
    assert not is_worth_fetching(KvReturn.ALWAYS, replace(slow, room_tokens=255))
    assert is_worth_fetching(KvReturn.ALWAYS, replace(slow, room_tokens=256))


@pytest.mark.parametrize("policy", KvReturn)
@pytest.mark.parametrize(
    "facts", [replace(ANSWER, missing_tokens=0), replace(ANSWER, room_tokens=-5)]
)
def test_nobody_fetches_nothing_nor_what_does_not_fit(policy, facts):
    assert not is_worth_fetching(policy, facts)


def test_never_is_never():
    assert not is_worth_fetching(KvReturn.NEVER, ANSWER)
