"""Sends what became of requests to an OpenTelemetry collector, by OTLP over gRPC.

Spans are made of a request's timeline once it has ended, so that nothing is done for them while it
runs, and those of workers have their workers' resources, although it is the router that sends them:
what workers know comes up the stream that the answer takes anyway. A collector that is slow or away
costs spans, never a request: they wait in a bounded queue, which a thread empties.

Needs the extra `otel`.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import threading
from typing import TYPE_CHECKING, Any

from kvferry.errors import ConfigError
from router.request_log import Outcome
from router.timeline import ROUTER, timeline

if TYPE_CHECKING:
    from opentelemetry.metrics import Histogram
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext

    from kvferry.tracing_config import TracingConfig
    from router.request_log import RequestRecord
    from router.timeline import Span

_QUEUE_SPANS_MAX = 8192
"""Spans that wait for the collector, some 2 kB each; a request has about 12."""
_BATCH_SPANS_MAX = 512
_DELAY_MS = 1000.0
"""Until a batch leaves that is not full."""
_EXPORT_TIMEOUT_S = 5
_METRICS_INTERVAL_MS = 10_000.0
_CLOSE_S = 3.0
_WORKERS_REMEMBERED_MAX = 1024

_SCOPE = "kvferry"
_PROVIDER = "kvferry"
"""`gen_ai.provider.name`: who serves the model."""
_OPERATION = "generate_content"

_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
"""Bounds that the conventions advise."""
_FIRST_TOKEN = (*(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1), *(0.25, 0.5, 0.75, 1, 2.5, 5))
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


def open_export(config: TracingConfig, served_name: str) -> RequestExport | None:
    """None if nothing is to be sent. Raises `ConfigError` where the extra is not installed."""
    endpoint = config.otlp_endpoint
    if not endpoint:
        return None
    if not _is_installed():
        problem = "needs the extra `otel`: pip install 'kvferry[otel]'"
        raise ConfigError("tracing.otlp_endpoint", problem)
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # The library says once more, with a trace, what it drops.
    logging.getLogger("opentelemetry.exporter").setLevel(logging.ERROR)
    how: dict[str, Any] = {"insecure": endpoint.startswith("http://"), "timeout": _EXPORT_TIMEOUT_S}
    spans = BatchSpanProcessor(
        OTLPSpanExporter(endpoint, **how),
        max_queue_size=_QUEUE_SPANS_MAX,
        schedule_delay_millis=_DELAY_MS,
        max_export_batch_size=_BATCH_SPANS_MAX,
    )
    reader = PeriodicExportingMetricReader(
        OTLPMetricExporter(endpoint, **how), export_interval_millis=_METRICS_INTERVAL_MS
    )
    meters = MeterProvider([reader], _resource(ROUTER), shutdown_on_exit=False)
    return RequestExport(served_name, spans, meters)


def _is_installed() -> bool:
    names = ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc")
    try:
        return all(importlib.util.find_spec(name) is not None for name in names)
    except ModuleNotFoundError:
        return False


class RequestExport:
    """Takes the records of requests that have ended."""

    def __init__(self, served_name: str, spans: SpanProcessor, meters: MeterProvider) -> None:
        self._served_name = served_name
        self._spans = spans
        self._meters = meters
        meter = meters.get_meter(_SCOPE)
        self._duration: Histogram = meter.create_histogram(
            "gen_ai.server.request.duration", "s", explicit_bucket_boundaries_advisory=_SECONDS
        )
        self._first_token: Histogram = meter.create_histogram(
            "gen_ai.server.time_to_first_token",
            "s",
            explicit_bucket_boundaries_advisory=_FIRST_TOKEN,
        )
        self._per_token: Histogram = meter.create_histogram(
            "gen_ai.server.time_per_output_token",
            "s",
            explicit_bucket_boundaries_advisory=_PER_TOKEN,
        )

    def note(self, record: RequestRecord) -> None:
        """Measure it, and send its spans if its trace is sampled. Never waits."""
        self._measure(record)
        if record.trace.is_sampled:
            for span in _spans_of(record, self._served_name):
                self._spans.on_end(span)

    def close(self) -> None:
        """Send what waits, and end. Blocks, for `_CLOSE_S` at most."""
        # The library's own deadlines add up, batch by batch, while the collector is away. What is
        # not done by then ends with the process.
        ending = threading.Thread(target=self._end, name="export-end", daemon=True)
        ending.start()
        ending.join(_CLOSE_S)

    def _end(self) -> None:
        self._spans.shutdown()
        self._meters.shutdown()

    def _measure(self, record: RequestRecord) -> None:
        assert record.ended_at is not None, "only what has ended is told"
        told = {
            "gen_ai.operation.name": _OPERATION,
            "gen_ai.provider.name": _PROVIDER,
            "gen_ai.request.model": record.model or self._served_name,
        }
        if record.error_kind is not None:
            told["error.type"] = record.error_kind.value
        self._duration.record(record.ended_at - record.arrived_at, told)
        if record.outcome is Outcome.SUCCEEDED and record.first_token_at is not None:
            self._first_token.record(record.first_token_at - record.arrived_at, told)
            if record.usage is not None and record.usage.itl_ms:
                self._per_token.record(record.usage.itl_ms / 1000.0, told)


def _spans_of(record: RequestRecord, served_name: str) -> list[ReadableSpan]:
    """Of the whole and of everything in it."""
    from opentelemetry.trace import SpanKind

    root = timeline(record)
    model = record.model or served_name
    made: list[ReadableSpan] = []

    def add(span: Span, parent: SpanContext | None, depth: int) -> None:
        context = _context(record, is_root=depth == 0)
        name = span.name if depth else f"{_OPERATION} {model}"
        attributes = dict(span.attributes)
        if depth == 0:
            attributes["gen_ai.request.model"] = model
        attributes |= {"gen_ai.operation.name": _OPERATION, "gen_ai.provider.name": _PROVIDER}
        kind = SpanKind.INTERNAL if depth else SpanKind.SERVER
        made.append(_readable(span, name, (context, parent, kind), attributes, record))
        for child in span.children:
            add(child, context, depth + 1)

    add(root, _parent_context(record), 0)
    return made


def _readable(
    span: Span,
    name: str,
    place: tuple[SpanContext, SpanContext | None, Any],
    attributes: dict[str, Any],
    record: RequestRecord,
) -> ReadableSpan:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import Status, StatusCode

    context, parent, kind = place
    status = Status()
    if span.error or span.error_kind:
        status = Status(StatusCode.ERROR, span.error)
        attributes["error.type"] = span.error_kind
    end_s = span.start_s if span.end_s is None else max(span.start_s, span.end_s)
    return ReadableSpan(
        name=name,
        context=context,
        parent=parent,
        resource=_resource(span.place),
        attributes=attributes,
        kind=kind,
        instrumentation_scope=_scope(),
        status=status,
        start_time=_unix_ns(record, span.start_s),
        end_time=_unix_ns(record, end_s),
    )


def _context(record: RequestRecord, *, is_root: bool) -> SpanContext:
    from opentelemetry.trace import SpanContext, TraceFlags
    from opentelemetry.trace.span import TraceState

    trace = record.trace if is_root else record.trace.child()
    return SpanContext(
        int(trace.trace_id, 16),
        int(trace.span_id, 16),
        is_remote=False,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
        trace_state=TraceState.from_header([trace.state]) if trace.state else None,
    )


def _parent_context(record: RequestRecord) -> SpanContext | None:
    from opentelemetry.trace import SpanContext, TraceFlags

    parent = record.parent
    if parent is None:
        return None
    flags = TraceFlags(TraceFlags.SAMPLED * parent.is_sampled)
    return SpanContext(int(parent.trace_id, 16), int(parent.span_id, 16), True, flags)


@functools.lru_cache(_WORKERS_REMEMBERED_MAX)
def _resource(place: str) -> Resource:
    from opentelemetry.sdk.resources import Resource

    service = "kvferry-router" if place == ROUTER else "kvferry-worker"
    return Resource({"service.name": service, "service.instance.id": place})


@functools.cache
def _scope() -> InstrumentationScope:
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    return InstrumentationScope(_SCOPE)


def _unix_ns(record: RequestRecord, offset_s: float) -> int:
    return round(1e9 * (record.arrived_unix_s + offset_s))
