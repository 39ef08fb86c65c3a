from __future__ import annotations

from kv_transfer.prompt_times import PromptTimes
from kvferry.attempt_marks import PromptMarks


def test_all_is_told_since_the_prompt_was_asked_for():
    times = PromptTimes(10.0, scheduled_at=11.0, computed_at=13.0, granted_at=12.0)
    assert times.completed(14.0) == PromptMarks(
        scheduled_s=1.0, computed_s=3.0, granted_s=2.0, completed_s=4.0
    )


def test_a_grant_that_lets_everything_go_at_once_is_the_end():
    times = PromptTimes(10.0, scheduled_at=11.0, computed_at=13.0)
    assert times.completed(14.0).granted_s == 4.0
