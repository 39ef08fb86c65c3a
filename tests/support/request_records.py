"""Records as a router's log has them, with times that are easy to add."""

from __future__ import annotations

from typing import Any

from kvferry.ids import Attempt, RequestId, WorkerId
from kvferry.trace_context import TraceContext
from router.request_log import AttemptRecord, Outcome, RequestRecord

TRACE = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", is_sampled=True)


def request_record(*attempts: AttemptRecord, **fields: Any) -> RequestRecord:
    """It arrived at 10.0, was tokenized at 10.5 and placed at 10.75."""
    given: dict[str, Any] = {
        "request_id": RequestId("r1"),
        "trace": TRACE,
        "parent": None,
        "model": "",
        "tenant": "",
        "service_class": "standard",
        "max_tokens": 16,
        "arrived_at": 10.0,
        "arrived_unix_s": 1.75e9,
        "prompt_tokens": 7,
        "prepared_at": 10.5,
        "placed_at": 10.75,
        "outcome": Outcome.SUCCEEDED,
        "attempts": list(attempts),
    }
    return RequestRecord(**given | fields)


def attempt_record(**fields: Any) -> AttemptRecord:
    """The first one, at decode-0 with a prompt of prefill-0."""
    given: dict[str, Any] = {
        "number": Attempt(1),
        "decode_worker": WorkerId("decode-0"),
        "prefill_worker": WorkerId("prefill-0"),
    }
    return AttemptRecord(**given | fields)
