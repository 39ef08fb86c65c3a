"""Gaps between arrivals, and their percentiles."""

from __future__ import annotations

import pytest

from benchmarks.token_gaps import Window, gaps_in, percentile


def test_a_gap_counts_in_the_window_in_which_it_begins() -> None:
    gaps = gaps_in([[0.0, 1.0, 1.5, 9.0, 9.5]], Window(1.0, 9.0))
    assert gaps == [0.5, 7.5]


def test_a_stall_that_outlives_the_window_counts_in_full() -> None:
    assert gaps_in([[1.0, 100.0]], Window(0.0, 2.0)) == [99.0]


def test_streams_are_not_mixed() -> None:
    assert gaps_in([[0.0, 1.0], [0.25, 2.25]], Window(0.0, 10.0)) == [1.0, 2.0]


def test_a_stream_without_two_arrivals_has_no_gap() -> None:
    assert gaps_in([[], [1.0]], Window(0.0, 10.0)) == []


@pytest.mark.parametrize(
    ("percent", "expected"), [(1, 1), (50, 50), (50.5, 51), (99, 99), (99.5, 100), (100, 100)]
)
def test_percentile_is_of_the_nearest_rank(percent: float, expected: int) -> None:
    assert percentile(reversed(range(1, 101)), percent) == expected


def test_percentile_of_few_values_is_one_of_them() -> None:
    assert percentile([7.0, 3.0], 50) == 3.0
    assert percentile([7.0, 3.0], 99) == 7.0


def test_nothing_has_no_percentile() -> None:
    with pytest.raises(AssertionError, match="no values"):
        percentile([], 50)
