"""`Admin.Traces`: what the router's log has of requests, as timelines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvferry.errors import InvalidInput, UnknownRequest
from kvferry.limits import TRACES_TOLD_MAX
from kvferry.rpc.v1 import inference_pb2
from kvferry.rpc_errors import status_of_errors
from router.api.message_parsing import parse_message
from router.timeline import timeline

if TYPE_CHECKING:
    from kvferry.clock import Clock
    from router.request_log import RequestLog, RequestRecord
    from router.timeline import Span

_COUNT_DEFAULT = 20


class RequestTraces:
    """Answers from one router's log."""

    def __init__(self, log: RequestLog, clock: Clock) -> None:
        self._log = log
        self._clock = clock

    async def traces(self, data: bytes, context: Any) -> inference_pb2.TracesResponse:
        """One request by its id, or the latest ones."""
        answer = inference_pb2.TracesResponse()
        async with status_of_errors(context):
            message = parse_message(inference_pb2.TracesRequest, data)
            count_max = message.count_max if message.HasField("count_max") else _COUNT_DEFAULT
            if not 0 < count_max <= TRACES_TOLD_MAX:
                raise InvalidInput("count_max", f"is {count_max}; must be 1 to {TRACES_TOLD_MAX}")
            records = self._find(message.name) if message.name else self._latest(count_max)
            now = self._clock.now()
            answer.requests.extend(_trace_to_wire(record, now) for record in records)
        return answer

    def _find(self, name: str) -> list[RequestRecord]:
        record = self._log.find(name)
        if record is None:
            raise UnknownRequest(name)
        return [record]

    def _latest(self, count_max: int) -> list[RequestRecord]:
        records = [*reversed(self._log.running()), *self._log.recent(count_max)]
        return records[:count_max]


def _trace_to_wire(record: RequestRecord, now: float) -> inference_pb2.RequestTrace:
    until = now if record.ended_at is None else record.ended_at
    return inference_pb2.RequestTrace(
        request_id=record.request_id,
        trace_id=record.trace.trace_id,
        arrived_unix_s=record.arrived_unix_s,
        outcome=record.outcome.value,
        duration_s=until - record.arrived_at,
        span=_span_to_wire(timeline(record)),
    )


def _span_to_wire(span: Span) -> inference_pb2.TraceSpan:
    return inference_pb2.TraceSpan(
        name=span.name,
        place=span.place,
        start_s=span.start_s,
        end_s=span.end_s,
        error=span.error,
        error_kind=span.error_kind,
        attributes={key: _text(value) for key, value in span.attributes.items()},
        children=map(_span_to_wire, span.children),
    )


def _text(value: str | float | tuple[str, ...]) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)
