"""Spans of a request: on one scale, although every process has a clock of its own."""

from __future__ import annotations

import pytest

from kvferry.attempt_marks import AttemptMarks, PromptMarks
from kvferry.errors import ErrorKind
from router.request_log import AttemptRecord, Outcome, RequestRecord
from router.timeline import ROUTER, timeline
from tests.support.request_records import attempt_record, request_record


def spans_of(record: RequestRecord) -> dict[str, tuple[float, float | None, str]]:
    return {
        span.name: (round(span.start_s, 6), span.end_s and round(span.end_s, 6), span.place)
        for _, span in timeline(record).walk()
    }


def test_a_handoff_is_laid_out_on_the_routers_scale():
    marks = AttemptMarks(
        fetched_s=0.1,
        ready_s=0.4,
        granted_s=0.5,
        first_token_s=1.0,
        adopted_s=1.2,
        ended_s=2.0,
        source=PromptMarks(scheduled_s=0.2, computed_s=0.7, granted_s=0.3, completed_s=0.8),
    )
    # The worker knows of 2.0 s, the router of 2.4: 0.2 s each way.
    record = request_record(
        attempt_record(started_at=11.0, first_token_at=12.4, ended_at=13.4, marks=marks),
        ended_at=13.5,
    )
    assert spans_of(record) == {
        "request": (0.0, 3.5, ROUTER),
        "tokenize": (0.0, 0.5, ROUTER),
        "queue": (0.5, 0.75, ROUTER),
        "route": (0.75, 1.0, ROUTER),
        "attempt 1": (1.0, 3.4, ROUTER),
        "wait": (1.2, 1.3, "decode-0"),
        "handoff": (1.3, 2.4, "decode-0"),
        # Its offer came 0.3 s after it was asked, and it knows of 0.2.
        "prefill.queue": (1.35, 1.55, "prefill-0"),
        "prefill": (1.55, 2.05, "prefill-0"),
        "transfer": (1.7, 2.4, "decode-0"),
        "decode": (2.4, 3.2, "decode-0"),
    }


def test_a_prompt_computed_where_it_is_decoded():
    marks = AttemptMarks(admitted_s=0.25, first_token_s=1.0, ended_s=2.0)
    record = request_record(
        attempt_record(
            prefill_worker=None, started_at=11.0, first_token_at=12.0, ended_at=13.0, marks=marks
        ),
        ended_at=13.0,
    )
    found = spans_of(record)
    assert found["wait"] == (1.0, 1.25, "decode-0")
    assert found["prefill"] == (1.25, 2.0, "decode-0")
    assert found["decode"] == (2.0, 3.0, "decode-0")
    assert "handoff" not in found


def test_both_attempts_of_a_request_that_failed_over():
    broken = AttemptMarks(fetched_s=0.1, ready_s=0.2)
    record = request_record(
        attempt_record(
            started_at=11.0,
            ended_at=12.0,
            marks=broken,
            error="decode-0 is gone",
            error_kind=ErrorKind.UNAVAILABLE,
        ),
        attempt_record(number=2, decode_worker="decode-1", started_at=12.5, ended_at=13.0),
        ended_at=13.0,
    )
    root = timeline(record)
    routes = [span for span in root.children if span.name == "route"]
    first, second = (span for span in root.children if span.name.startswith("attempt"))
    assert (first.error, first.error_kind) == ("decode-0 is gone", "unavailable")
    assert [span.name for _, span in first.walk(0)][1:] == [
        *("wait", "handoff", "prefill.queue", "prefill"),
    ]
    # What it was at lasted until it failed.
    assert first.children[-1].end_s == pytest.approx(2.0)
    assert second.error == ""
    assert [(span.start_s, span.end_s) for span in routes] == [(0.75, 1.0), (2.0, 2.5)]
    assert root.attributes["kvferry.request.failed_attempts"] == 1


def test_what_goes_on_has_no_end():
    record = request_record(attempt_record(started_at=11.0), outcome=Outcome.RUNNING)
    found = spans_of(record)
    assert found["request"][1] is found["attempt 1"][1] is None


def test_a_request_that_never_came_to_a_worker():
    record = request_record(ended_at=14.0, outcome=Outcome.REFUSED)
    record.placed_at = None
    assert spans_of(record) == {
        "request": (0.0, 4.0, ROUTER),
        "tokenize": (0.0, 0.5, ROUTER),
        "queue": (0.5, 4.0, ROUTER),
    }


def test_a_clock_that_runs_faster_moves_nothing_before_its_cause():
    marks = AttemptMarks(admitted_s=0.25, first_token_s=1.5, ended_s=9.0)
    record = request_record(
        attempt_record(started_at=11.0, first_token_at=12.0, ended_at=13.0, marks=marks),
        ended_at=13.0,
    )
    assert spans_of(record)["wait"][0] == 1.0


def test_an_attempt_record_keeps_the_last_that_was_told():
    record = attempt_record(started_at=11.0)
    assert isinstance(record, AttemptRecord)
    assert record.marks is None
