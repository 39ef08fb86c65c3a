"""Requests in the console's words: what they cost, and their phases on one scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.timeline import timeline

if TYPE_CHECKING:
    from collections.abc import Iterator

    from router.api.console.shapes import PhaseOut, RequestOut
    from router.request_log import RequestLog, RequestRecord
    from router.timeline import Span

_SHOWN = {
    "tokenize": "queue",
    "queue": "queue",
    "route": "queue",
    "wait": "queue",
    "prefill.queue": "queue",
    "prefill": "prefill",
    "transfer": "transfer",
    "decode": "decode",
}
"""What each span is drawn as; the others only hold these."""


def requests_out(log: RequestLog, count_max: int, now_s: float) -> list[RequestOut]:
    """Those in flight, and those that ended last: the latest first, at most so many."""
    running = sorted(log.running(), key=lambda record: -record.arrived_at)[:count_max]
    ended = log.recent(count_max - len(running))
    return [_request_out(record, now_s) for record in (*running, *ended)]


def first_token_at(record: RequestRecord) -> float | None:
    """When the first token of a request came, in whichever attempt; None: it has not."""
    times = (each.first_token_at for each in record.attempts)
    return min((at for at in times if at is not None), default=None)


def _request_out(record: RequestRecord, now_s: float) -> RequestOut:
    until_s = now_s if record.ended_at is None else record.ended_at
    usage, last = record.usage, record.attempts[-1] if record.attempts else None
    kv = None if last is None else last.usage
    first_at = first_token_at(record)
    return {
        "id": record.request_id,
        "tenant": record.tenant,
        "service_class": record.service_class,
        "arrived_at_s": record.arrived_at,
        "duration_s": until_s - record.arrived_at,
        "outcome": record.outcome.value,
        "error": record.error,
        "prompt_tokens": record.prompt_tokens,
        "generated_tokens": sum(each.tokens for each in record.attempts),
        "cached_tokens": 0 if kv is None else kv.prefill_hit_tokens + kv.host_hit_tokens,
        "moved_bytes": 0 if kv is None else kv.moved_bytes,
        "attempts": len(record.attempts) + record.attempts_left_out,
        "prefill_worker": None if last is None else last.prefill_worker,
        "decode_worker": None if last is None else last.decode_worker,
        "ttft_s": None if first_at is None else first_at - record.arrived_at,
        "itl_s": usage.itl_ms / 1000 if usage is not None and usage.itl_ms > 0 else None,
        "phases": list(_phases(timeline(record), until_s - record.arrived_at, "")),
    }


def _phases(span: Span, until_s: float, attempt: str) -> Iterator[PhaseOut]:
    """The innermost spans, in order; what goes on ends now."""
    attempt = span.name.removeprefix("attempt ") if span.name.startswith("attempt ") else attempt
    kind = _SHOWN.get(span.name)
    if kind is not None:
        yield {
            "name": span.name,
            "kind": kind,
            "place": span.place,
            "attempt": attempt,
            "start_s": round(span.start_s, 6),
            "end_s": round(until_s if span.end_s is None else span.end_s, 6),
        }
    for child in span.children:
        yield from _phases(child, until_s, attempt)
