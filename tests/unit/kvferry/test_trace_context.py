"""`traceparent` as the standard has it: what is taken over, what begins a trace of its own."""

from __future__ import annotations

import pytest

from kvferry.trace_context import TraceContext, begin_trace, parse_traceparent

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"


@pytest.mark.parametrize(
    ("header", "sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f" 00-{TRACE}-{SPAN}-03 ", True),
        (f"cc-{TRACE}-{SPAN}-01-what.comes.later", True),
    ],
)
def test_a_header_is_read(header, sampled):
    assert parse_traceparent(header) == TraceContext(TRACE, SPAN, sampled)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-0g",
    ],
)
def test_what_is_no_header_is_none(header):
    assert parse_traceparent(header) is None


def test_the_child_is_another_span_of_the_same_trace():
    parent = TraceContext(TRACE, SPAN, is_sampled=True, state="vendor=1")
    child = parent.child()
    assert (child.trace_id, child.is_sampled, child.state) == (TRACE, True, "vendor=1")
    assert child.span_id != SPAN
    assert parse_traceparent(child.header()) == TraceContext(TRACE, child.span_id, True)


def test_too_much_state_is_dropped():
    assert parse_traceparent(f"00-{TRACE}-{SPAN}-01", "x" * 513).state == ""


def test_the_ratio_is_kept():
    kept = sum(begin_trace(0.25).is_sampled for _ in range(4000))
    # Five standard deviations.
    assert 860 < kept < 1140
    assert begin_trace(1.0).is_sampled
    assert not begin_trace(0.0).is_sampled
