"""The layout of a step."""

from __future__ import annotations

import numpy as np
import pytest

from engine.forward_batch import SequenceStep, build_forward_batch
from engine.lora import AdapterRows
from kvferry.ids import AdapterId
from tests.support.paged_kv import make_rows


def _ids(*tokens: int) -> np.ndarray:
    return np.asarray(tokens, dtype=np.int32)


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_sequences_lie_one_after_the_other(page_size: int) -> None:
    rows = make_rows(page_size, 3)
    batch = build_forward_batch(
        [
            SequenceStep(2, _ids(10, 11, 12), prefix_len=5, wants_logits=False),
            SequenceStep(1, _ids(20), prefix_len=70, wants_logits=True),
            SequenceStep(3, _ids(30, 31), prefix_len=0, wants_logits=True),
        ],
        rows,
        page_size,
    )
    assert batch.token_ids.tolist() == [10, 11, 12, 20, 30, 31]
    assert batch.positions.tolist() == [5, 6, 7, 70, 0, 1]
    assert batch.logits_at.tolist() == [3, 5]
    slots = [*rows.read(2, 5, 8), *rows.read(1, 70, 71), *rows.read(3, 0, 2)]
    assert batch.out_slots.tolist() == slots
    assert batch.attention.kv_lengths.tolist() == [8, 71, 2]
    assert batch.attention.qo_indptr.tolist() == [0, 3, 4, 6]


def test_a_draft_wants_the_logits_before_it_and_after_each_of_its_tokens() -> None:
    steps = [
        SequenceStep(1, _ids(1, 2), prefix_len=0, wants_logits=False),
        SequenceStep(2, _ids(10, 11, 12), prefix_len=7, wants_logits=True, draft_len=2),
        SequenceStep(3, _ids(20), prefix_len=3, wants_logits=True),
    ]
    batch = build_forward_batch(steps, make_rows(4, 3), 4)
    assert batch.logits_at.tolist() == [2, 3, 4, 5]
    assert batch.positions.tolist() == [0, 1, 7, 8, 9, 3]
    assert batch.attention.kv_lengths.tolist() == [2, 10, 4]


def test_no_sequence_may_want_logits() -> None:
    steps = [SequenceStep(1, _ids(1, 2), prefix_len=0, wants_logits=False)]
    batch = build_forward_batch(steps, make_rows(4, 1), 4)
    assert batch.logits_at.tolist() == []


def test_an_empty_step_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        build_forward_batch([], make_rows(1, 1), 1)


def test_tokens_of_one_adapter_lie_together_and_logits_come_as_sequences_were_given() -> None:
    two, one = AdapterId("two"), AdapterId("one")
    steps = [
        SequenceStep(1, _ids(1), prefix_len=8, wants_logits=True, adapter=two),
        SequenceStep(2, _ids(2, 3), prefix_len=4, wants_logits=True, draft_len=1),
        SequenceStep(3, _ids(4, 5, 6), prefix_len=0, wants_logits=False, adapter=one),
        SequenceStep(1, _ids(7), prefix_len=9, wants_logits=True, adapter=two),
        SequenceStep(2, _ids(8), prefix_len=6, wants_logits=True),
    ]
    batch = build_forward_batch(steps, make_rows(4, 3), 4)
    assert batch.token_ids.tolist() == [2, 3, 8, 4, 5, 6, 1, 7]
    assert batch.positions.tolist() == [4, 5, 6, 0, 1, 2, 8, 9]
    assert batch.logits_at.tolist() == [6, 0, 1, 7, 2]
    assert batch.adapted == (AdapterRows(one, slice(3, 6)), AdapterRows(two, slice(6, 8)))


def test_without_adapters_nothing_moves() -> None:
    steps = [SequenceStep(row, _ids(row), prefix_len=0, wants_logits=True) for row in (2, 1)]
    batch = build_forward_batch(steps, make_rows(4, 2), 4)
    assert (batch.token_ids.tolist(), batch.adapted) == ([2, 1], ())
