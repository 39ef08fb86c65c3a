from __future__ import annotations

from decode_worker.attempt_times import AttemptTimes, Mark
from kvferry.attempt_marks import AttemptMarks, PromptMarks
from kvferry.clock import ManualClock


def test_marks_are_seconds_since_the_attempt_came():
    clock = ManualClock(7.0)
    times = AttemptTimes(clock, 6.5)
    times.note(Mark.FETCHED)
    clock.advance(1.0)
    times.note(Mark.READY)
    clock.advance(1.0)
    times.note(Mark.READY)
    source = PromptMarks(0.1, 0.2, 0.3, 0.4)
    assert times.marks(source) == AttemptMarks(fetched_s=0.5, ready_s=1.5, source=source)


def test_every_mark_has_its_field():
    assert {mark.value for mark in Mark} | {"source"} == set(AttemptMarks.__dataclass_fields__)
