from __future__ import annotations

from cluster.gantt import gantt, traces_table
from kvferry.rpc.v1 import inference_pb2 as inference


def _trace(**fields):
    children = [
        inference.TraceSpan(name="queue", place="router", start_s=0.0, end_s=0.5),
        inference.TraceSpan(
            name="attempt 1",
            place="router",
            start_s=0.5,
            end_s=1.0,
            error="decode-0 is gone",
            error_kind="unavailable",
            children=[inference.TraceSpan(name="wait", place="decode-0", start_s=0.5, end_s=0.5)],
        ),
        inference.TraceSpan(name="attempt 2", place="router", start_s=1.5),
    ]
    span = inference.TraceSpan(
        name="request",
        place="router",
        children=children,
        attributes={"kvferry.request.attempts": "2", "kvferry.request.id": "r"},
    )
    given = {"request_id": "r", "trace_id": "ab", "outcome": "running", "duration_s": 2.0}
    return inference.RequestTrace(**given | fields, arrived_unix_s=1.75e9, span=span)


def test_each_span_has_a_line_with_its_bar():
    lines = gantt(_trace()).splitlines()
    assert lines[0] == "r: running, 2.000 s, arrived 2025-06-15 15:06:40 UTC, trace ab"
    rows = {line[:15].strip(): line for line in lines[4:9]}
    assert rows["request"].endswith("▒" * 48)
    assert rows["queue"].endswith("500.0  " + "█" * 12)
    assert rows["attempt 1 !"].endswith(" " * 12 + "█" * 12)
    assert rows["wait"].endswith(" " + "█"), "what took no time is seen, too"
    assert rows["attempt 2"].endswith("500.0...  " + " " * 36 + "▒" * 12)
    assert "attempt 1 failed: unavailable: decode-0 is gone" in lines
    assert lines[-1] == "request: request.attempts 2"


def test_an_empty_timeline_does_not_divide_by_it():
    assert "█" in gantt(_trace(duration_s=0.0))


def test_an_id_cannot_steer_the_terminal():
    evil = _trace(request_id="\x1b[2Jr")
    assert "\x1b" not in gantt(evil) + traces_table([evil])


def test_the_list_has_a_line_for_each():
    assert traces_table([_trace(), _trace()]).splitlines()[-1].split() == [
        *("2025-06-15", "15:06:40", "running", "2.000", "2", "r", "ab"),
    ]
