"""W3C trace context: which trace a request belongs to, as the header `traceparent` says it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
"""Headers of HTTP and keys of gRPC metadata alike."""

TRACESTATE_CHARACTERS_MAX = 512
"""What the standard asks everybody to pass on; a longer one is dropped."""

_SAMPLED = 0x01
# Later versions may append fields; version ff is forbidden.
_HEADER = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_RATIO_BITS = 64


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span of a trace, as another process names it."""

    trace_id: str
    """32 hexadecimal digits, not all 0."""
    span_id: str
    """16 hexadecimal digits, not all 0."""
    is_sampled: bool
    """Whether somebody records the trace."""
    state: str = ""
    """What others want passed on, as it came."""

    def header(self) -> str:
        """`traceparent`."""
        return f"00-{self.trace_id}-{self.span_id}-{_SAMPLED * self.is_sampled:02x}"

    def child(self) -> TraceContext:
        """A new span below this one."""
        return TraceContext(self.trace_id, _new_id(8), self.is_sampled, self.state)


def parse_traceparent(header: str, state: str = "") -> TraceContext | None:
    """None if there is no header or it is not valid: then a trace of its own begins, as the
    standard asks."""
    match = _HEADER.fullmatch(header.strip())
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if int(trace_id, 16) == 0 or int(span_id, 16) == 0 or (version == "00" and more):
        return None
    if len(state) > TRACESTATE_CHARACTERS_MAX:
        state = ""
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED), state)


def begin_trace(sample_ratio: float) -> TraceContext:
    """The first span of a new trace, of which `sample_ratio` are recorded."""
    trace_id = _new_id(16)
    # By the id, as OpenTelemetry does, so that every process would decide alike.
    drawn = int(trace_id[-_RATIO_BITS // 4 :], 16)
    return TraceContext(trace_id, _new_id(8), drawn < sample_ratio * 2**_RATIO_BITS)


def _new_id(size_bytes: int) -> str:
    while True:
        drawn = os.urandom(size_bytes)
        if any(drawn):
            return drawn.hex()
