"""The timeline of a request as text: a line for each span, with a bar where it was."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from cluster.tables import format_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvferry.rpc.v1 import inference_pb2 as inference

_BAR_CHARACTERS = 48
_FULL, _OPEN = "█", "▒"
"""An open bar goes on."""


def gantt(trace: inference.RequestTrace) -> str:
    """One request, its spans below one another, then what is known of each attempt."""
    rows = [_row(depth, span, trace.duration_s) for depth, span in _walk(trace.span, 0)]
    lines = [_headline(trace), "", format_table(("span", "where", "from ms", "ms", ""), rows)]
    for _, span in _walk(trace.span, 0):
        if span.error:
            lines += ["", f"{span.name} failed: {span.error_kind}: {span.error}"]
    facts = [(span.name, _facts(span)) for _, span in _walk(trace.span, 0) if span.attributes]
    lines += ["", *(f"{name}: {text}" for name, text in facts)]
    return "\n".join(lines)


def traces_table(traces: list[inference.RequestTrace]) -> str:
    """One line for each request."""
    header = ("arrived (UTC)", "outcome", "s", "attempts", "request id", "trace id")
    return format_table(header, map(_summary, traces))


def _summary(trace: inference.RequestTrace) -> tuple[str, ...]:
    return (
        _time_of_day(trace.arrived_unix_s),
        trace.outcome,
        f"{trace.duration_s:.3f}",
        trace.span.attributes["kvferry.request.attempts"],
        _shown(trace.request_id),
        trace.trace_id,
    )


def _headline(trace: inference.RequestTrace) -> str:
    return (
        f"{_shown(trace.request_id)}: {trace.outcome}, {trace.duration_s:.3f} s, "
        f"arrived {_time_of_day(trace.arrived_unix_s)} UTC, trace {trace.trace_id}"
    )


def _row(depth: int, span: inference.TraceSpan, whole_s: float) -> tuple[str, ...]:
    goes_on = not span.HasField("end_s")
    end_s = whole_s if goes_on else span.end_s
    name = f"{'  ' * depth}{span.name}{' !' * bool(span.error)}"
    took_ms = f"{1000 * (end_s - span.start_s):.1f}{'...' * goes_on}"
    bar = _bar(span.start_s, end_s, whole_s, _OPEN if goes_on else _FULL)
    return name, span.place, f"{1000 * span.start_s:.1f}", took_ms, bar


def _bar(start_s: float, end_s: float, whole_s: float, block: str) -> str:
    """At least one block, so that nothing is invisible."""
    scale = _BAR_CHARACTERS / whole_s if whole_s > 0 else 0.0
    first = min(_BAR_CHARACTERS - 1, int(start_s * scale))
    last = min(_BAR_CHARACTERS, max(first + 1, round(end_s * scale)))
    return " " * first + block * (last - first)


def _facts(span: inference.TraceSpan) -> str:
    names = sorted(span.attributes.keys() - {"kvferry.request.id"})
    return ", ".join(f"{name.removeprefix('kvferry.')} {span.attributes[name]}" for name in names)


def _walk(span: inference.TraceSpan, depth: int) -> Iterator[tuple[int, inference.TraceSpan]]:
    yield depth, span
    for child in span.children:
        yield from _walk(child, depth + 1)


def _time_of_day(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _shown(request_id: str) -> str:
    """Clients choose it: nothing of it may steer a terminal."""
    return request_id if request_id.isprintable() else repr(request_id)
