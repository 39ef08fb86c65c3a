"""The mean of a number over the time of late."""

from __future__ import annotations

import math

import pytest

from router.recent_mean import RecentMean


def test_a_number_that_stays_becomes_the_mean() -> None:
    mean = RecentMean(10.0)
    assert mean.mean(5.0) == 0.0
    mean.now_is(4, 5.0)
    assert mean.mean(5.0) == 0.0
    assert mean.mean(15.0) == pytest.approx(4 * (1 - math.exp(-1)))
    assert mean.mean(1000.0) == pytest.approx(4.0)
    mean.now_is(0, 1000.0)
    assert mean.mean(1010.0) == pytest.approx(4 * math.exp(-1))


def test_means_add_up_however_often_they_are_asked() -> None:
    one, other, both = RecentMean(10.0), RecentMean(10.0), RecentMean(10.0)
    for now in range(50):
        one.now_is(now % 3, now)
        both.now_is(now % 3 + now // 7, now)
        if now % 7 == 0:
            other.now_is(now // 7, now)
    assert one.mean(55.0) + other.mean(55.0) == pytest.approx(both.mean(55.0))
