"""What a collector is told of requests, over the real protocol."""

from __future__ import annotations

import dataclasses
import time

import pytest

from kvferry.attempt_marks import AttemptMarks
from kvferry.errors import ConfigError, ErrorKind
from kvferry.tracing_config import TracingConfig
from router import span_export
from router.request_log import Outcome
from router.span_export import open_export
from tests.support.collector import running_collector
from tests.support.ports import free_port
from tests.support.request_records import TRACE, attempt_record, request_record


def failed_over():
    first = attempt_record(
        started_at=11.0,
        ended_at=12.0,
        marks=AttemptMarks(fetched_s=0.1, ready_s=0.2),
        error="decode-0 is gone",
        error_kind=ErrorKind.UNAVAILABLE,
    )
    marks = AttemptMarks(admitted_s=0.1, first_token_s=0.2, ended_s=0.5)
    second = attempt_record(
        number=2,
        decode_worker="decode-1",
        started_at=12.5,
        first_token_at=12.7,
        ended_at=13.0,
        marks=marks,
    )
    return request_record(first, second, ended_at=13.0, first_token_at=12.7)


def told(*records):
    with running_collector() as collector:
        export = open_export(TracingConfig(otlp_endpoint=collector.endpoint), "a-model")
        for record in records:
            export.note(record)
        export.close()
    return collector


def test_both_attempts_reach_the_collector_below_the_clients_span():
    record = failed_over()
    record.parent = dataclasses.replace(TRACE, span_id="00f067aa0ba902b7")
    found = told(record).spans
    assert {each.span.trace_id.hex() for each in found} == {TRACE.trace_id}
    by_name = {each.span.name: each for each in found}
    root = by_name["generate_content a-model"]
    assert root.span.span_id.hex() == TRACE.span_id
    assert root.span.parent_span_id.hex() == "00f067aa0ba902b7"
    assert root.service == "kvferry-router"
    assert root.attributes["gen_ai.request.model"] == "a-model"
    assert root.attributes["gen_ai.usage.input_tokens"] == 7
    first, second = by_name["attempt 1"], by_name["attempt 2"]
    assert first.span.parent_span_id == second.span.parent_span_id == root.span.span_id
    assert (first.span.status.code, first.span.status.message) == (2, "decode-0 is gone")
    assert first.attributes["error.type"] == "unavailable"
    assert second.span.status.code == 0
    decode = by_name["decode"]
    assert decode.span.parent_span_id == second.span.span_id
    assert (decode.service, decode.instance) == ("kvferry-worker", "decode-1")
    assert root.span.start_time_unix_nano == 1_750_000_000 * 10**9
    assert root.span.end_time_unix_nano - root.span.start_time_unix_nano == 3 * 10**9
    assert len({each.span.span_id for each in found}) == len(found)


def test_a_trace_that_nobody_records_is_measured_and_not_sent():
    record = failed_over()
    record.trace = dataclasses.replace(TRACE, is_sampled=False)
    collector = told(record)
    assert collector.spans == []
    assert collector.metrics.keys() == {
        "gen_ai.server.request.duration",
        "gen_ai.server.time_to_first_token",
    }
    (point,) = collector.metrics["gen_ai.server.request.duration"].histogram.data_points
    assert (point.count, point.sum) == (1, 3.0)


def test_failures_are_measured_by_their_kind():
    record = request_record(
        ended_at=11.0, outcome=Outcome.REFUSED, error="full", error_kind=ErrorKind.OVERLOADED
    )
    collector = told(record)
    (point,) = collector.metrics["gen_ai.server.request.duration"].histogram.data_points
    assert "overloaded" in {entry.value.string_value for entry in point.attributes}
    assert "gen_ai.server.time_to_first_token" not in collector.metrics


def test_a_collector_that_is_away_delays_nothing():
    config = TracingConfig(otlp_endpoint=f"http://127.0.0.1:{free_port()}")
    export = open_export(config, "a-model")
    began = time.perf_counter()
    for _ in range(700):
        export.note(failed_over())
    # 9,800 spans for a queue of 8,192: what is too much is dropped. Some 0.5 s of one core.
    assert time.perf_counter() - began < 20
    began = time.perf_counter()
    export.close()
    assert time.perf_counter() - began < 10


def test_without_an_endpoint_nothing_is_opened():
    assert open_export(TracingConfig(), "a-model") is None


def test_without_the_extra_the_setting_is_refused(monkeypatch):
    monkeypatch.setattr(span_export, "_is_installed", lambda: False)
    with pytest.raises(ConfigError, match=r"tracing\.otlp_endpoint: needs the extra `otel`"):
        open_export(TracingConfig(otlp_endpoint="http://x"), "a-model")
