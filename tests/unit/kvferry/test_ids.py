from __future__ import annotations

import pytest

from kvferry.clock import ManualClock, MonotonicClock
from kvferry.ids import Attempt, AttemptId, RequestId, new_incarnation, new_request_id


def test_incarnations_differ_and_fit_63_bits():
    drawn = {new_incarnation() for _ in range(1000)}
    assert len(drawn) == 1000
    assert all(0 <= incarnation < 2**63 for incarnation in drawn)


def test_request_ids_differ():
    assert len({new_request_id() for _ in range(1000)}) == 1000


def test_attempts_are_compared_whole():
    assert AttemptId(RequestId("r1"), Attempt(1)) != AttemptId(RequestId("r10"), Attempt(1))
    assert AttemptId(RequestId("r"), Attempt(1)) != AttemptId(RequestId("r"), Attempt(2))
    assert str(AttemptId(RequestId("r"), Attempt(2))) == "r#2"


def test_a_manual_clock_moves_only_when_told_and_never_back():
    clock = ManualClock(5.0)
    assert clock.now() == clock.now() == 5.0
    clock.advance(1.5)
    assert clock.now() == 6.5
    with pytest.raises(AssertionError, match="cannot go back"):
        clock.advance(-1.0)


def test_the_real_clock_does_not_go_back():
    clock = MonotonicClock()
    assert clock.now() <= clock.now()
