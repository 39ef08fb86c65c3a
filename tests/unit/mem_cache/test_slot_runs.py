import numpy as np
import pytest

from mem_cache.slot_runs import RUN_TOKENS_MIN, SlotRun, slot_runs


def _slots(*ranges):
    return np.concatenate([np.arange(start, stop) for start, stop in ranges])


def test_neighbours_are_one_run():
    assert slot_runs(_slots((5, 9))) == [SlotRun(0, 5, 4)]
    assert slot_runs(_slots((7, 8))) == [SlotRun(0, 7, 1)]


def test_runs_follow_one_another_in_any_order():
    slots = _slots((40, 60), (8, 28), (28, 32))
    assert slot_runs(slots) == [SlotRun(0, 40, 20), SlotRun(20, 8, 24)]


@pytest.mark.parametrize(
    ("first", "stop", "parts"),
    [
        (18, 18 + 40, [(18, 14), (32, 16), (48, 10)]),
        (16, 16 + 48, [(16, 48)]),
        (16, 16 + 40, [(16, 32), (48, 8)]),
        (18, 18 + 30, [(18, 14), (32, 16)]),
        (20, 25, [(20, 5)]),
        (16, 20, [(16, 4)]),
        (28, 32, [(28, 4)]),
    ],
)
def test_a_run_is_cut_into_parts_of_pages_and_whole_ones(first, stop, parts):
    runs = slot_runs(_slots((first, stop)), page_size=16)
    assert runs is not None
    assert [(slot, tokens) for _, slot, tokens in runs] == parts
    assert [run.first for run in runs] == [slot - first for slot, _ in parts]


def test_many_short_runs_are_not_told():
    apart = np.arange(0, 2 * RUN_TOKENS_MIN, 2)
    assert slot_runs(apart) is None
    assert slot_runs(apart[:1]) is not None
    # Two runs are few among as many slots as a run should have, three are not.
    assert slot_runs(_slots((0, 10), (20, 26))) is not None
    assert slot_runs(_slots((0, 10), (20, 25))) is None
    assert slot_runs(_slots((0, 10), (20, 25), (30, 31))) is None


def test_cutting_at_pages_may_make_too_many():
    assert slot_runs(_slots((14, 18))) is not None
    assert slot_runs(_slots((14, 18)), page_size=16) is None
