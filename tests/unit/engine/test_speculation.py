"""Drafts by themselves: what is proposed, how much of it, and what that may take."""

from __future__ import annotations

import numpy as np
import pytest

from engine.scheduler import StepItem
from engine.speculation import Drafts, Trial, drafts_of, propose_by_ngram
from kvferry.config import NgramConfig
from tests.support.digest_model import answer
from tests.support.draft_oracle import ALWAYS, knowing
from tests.support.engine_bench import EngineBench

PROMPT = list(range(20, 31))


def _ids(*tokens: int) -> np.ndarray:
    return np.asarray(tokens, dtype=np.int32)


@pytest.mark.parametrize(
    ("known", "most", "expected"),
    [
        ((1, 2, 3, 4, 5, 1, 2), 3, [3, 4, 5]),
        ((1, 2, 3, 4, 5, 1, 2), 1, [3]),
        # The last of several places; the longer match, though it is earlier.
        ((1, 2, 8, 1, 2, 9, 1, 2), 1, [9]),
        ((5, 1, 2, 8, 6, 1, 2, 9, 5, 1, 2), 1, [8]),
        # A period is gone on with.
        ((7, 7, 7), 4, [7, 7, 7, 7]),
        ((3, 1, 2, 1, 2), 5, [1, 2, 1, 2, 1]),
        # One token is too few; so is what has never been there.
        ((1, 5, 2, 5), 4, []),
        ((1, 2, 3), 4, []),
        ((1,), 4, []),
    ],
)
def test_the_continuation_of_the_last_tokens_is_proposed(known, most, expected):
    assert propose_by_ngram(_ids(*known), most, 2, 4).tolist() == expected


def test_a_match_is_no_longer_than_is_looked_for():
    known = _ids(1, 2, 3, 4, 8, 2, 3, 4, 9, 1, 2, 3, 4)
    assert propose_by_ngram(known, 1, 2, 4).tolist() == [8]
    assert propose_by_ngram(known, 1, 2, 3).tolist() == [9]


def test_nothing_is_drafted_by_default():
    assert drafts_of(NgramConfig()) is None
    assert drafts_of(NgramConfig(max_draft=1)) is not None


# --- how much ------------------------------------------------------------------------------------


def _decoding(bench: EngineBench, name: str = "r", **options: object) -> StepItem:
    """A request with one token of its answer, as the next step would compute it."""
    request = bench.submit(name, PROMPT, **{"max_tokens": 20} | options)
    bench.engine.step()
    return StepItem(request, request.num_tokens - 1, request.num_tokens)


def _draft(drafts: Drafts, item: StepItem, tokens: int = 99, slots: int = 99, page: int = 4) -> int:
    (out,) = drafts.add([item], tokens, slots, page)
    return len(out.draft)


def test_a_draft_ends_with_the_step_the_slots_and_the_answer():
    bench = EngineBench(page_size=4)
    item = _decoding(bench)
    assert item.stop == 12
    drafts = knowing({"r": answer(PROMPT, 20)}, max_draft=8)
    assert _draft(drafts, item) == 8
    assert _draft(drafts, item, tokens=3) == 3
    assert _draft(drafts, item, tokens=-1) == 0
    # Its last page is full.
    assert _draft(drafts, item, slots=0) == 0
    assert _draft(drafts, item, slots=-8) == 0
    assert _draft(drafts, item, slots=4) == 4
    # One token of three to come needs no KV, and one is chosen without a draft.
    assert _draft(knowing({"s": answer(PROMPT, 4)}), _decoding(bench, "s", max_tokens=4)) == 2


def test_several_drafts_share_what_is_left():
    bench = EngineBench(page_size=4)
    items = [_decoding(bench, name) for name in "ab"]
    items = [StepItem(i.request, i.request.num_tokens - 1, i.request.num_tokens) for i in items]
    drafts = knowing({name: answer(PROMPT, 20) for name in "ab"}, max_draft=8)
    assert [len(i.draft) for i in drafts.add(items, 10, 99, 4)] == [8, 2]
    # `a` stands at 13 of 16 slots, `b` at 12 of 12.
    assert [len(i.draft) for i in drafts.add(items, 99, 4, 4)] == [7, 0]


def test_nothing_is_drafted_from_a_token_on_that_ends_the_answer():
    bench = EngineBench()
    expected = answer(PROMPT, 20)
    item = _decoding(bench, stop_token_ids=(expected[3],), min_tokens=19)
    assert _draft(knowing({"r": expected}), item) == 2


def _fed(chance_of_old: list[bool], cost: float, sequences: int = 1) -> int:
    """Length of the draft after guesses that were right or wrong, one a step."""
    bench = EngineBench()
    item = _decoding(bench)
    drafts = Drafts(lambda request, most: _ids(*[1] * most), 8, cost)
    for is_right in chance_of_old:
        _draft(drafts, item)
        trial = Trial(item.request, (1,), 0, accepted=int(is_right), is_over=not is_right)
        drafts.judge(trial)
    return len(drafts.add([item, *[item] * (sequences - 1)], 99, 999, 4)[0].draft)


def test_guesses_that_were_right_make_drafts_longer_and_others_shorter():
    fresh = _fed([], 6.0)
    assert 0 < fresh < _fed([True] * 6, 6.0)
    assert 0 < _fed([False], 6.0) < fresh
    assert _fed([False] * 8, 6.0) == 0


def test_among_more_sequences_a_guess_has_to_be_better():
    lengths = [_fed([True] * 2, 6.0, sequences) for sequences in (1, 4, 8, 32)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 2 > lengths[-1]


def test_guesses_that_are_not_computed_show_when_they_are_right_again():
    bench = EngineBench()
    item = _decoding(bench)
    request = item.request
    drafts = Drafts(lambda request, most: _ids(*[1] * most), 8, 6.0)
    for _ in range(12):
        _draft(drafts, item)
        drafts.judge(Trial(request, (1,), 0, is_over=True))
    assert _draft(drafts, item) == 0
    for _ in range(6):
        request.append(1)
        item = StepItem(request, request.num_tokens - 1, request.num_tokens)
        length = _draft(drafts, item)
    assert length > 0
    assert drafts.counters["draft_tokens_accepted"] == 0


def test_a_cost_that_is_out_of_proportion_drafts_always():
    assert _fed([False] * 20, ALWAYS) == 8
