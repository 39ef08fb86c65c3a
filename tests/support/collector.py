"""An OpenTelemetry collector: a gRPC server of the OTLP services that keeps what comes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import (
    metrics_service_pb2,
    metrics_service_pb2_grpc,
)
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class CollectedSpan:
    """A span, and who is said to have done it."""

    span: Any
    service: str
    instance: str

    @property
    def attributes(self) -> dict[str, Any]:
        return _values(self.span.attributes)


class _Traces(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, spans: list[CollectedSpan]) -> None:
        self._spans = spans

    def Export(self, request, context):
        for group in request.resource_spans:
            who = _values(group.resource.attributes)
            self._spans += (
                CollectedSpan(span, who["service.name"], who["service.instance.id"])
                for scope in group.scope_spans
                for span in scope.spans
            )
        return trace_service_pb2.ExportTraceServiceResponse()


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, metrics: dict[str, Any]) -> None:
        self._metrics = metrics

    def Export(self, request, context):
        for group in request.resource_metrics:
            for scope in group.scope_metrics:
                self._metrics |= {metric.name: metric for metric in scope.metrics}
        return metrics_service_pb2.ExportMetricsServiceResponse()


@dataclass(slots=True)
class Collector:
    """What has come."""

    endpoint: str
    spans: list[CollectedSpan] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    """The last of each name."""


@contextmanager
def running_collector() -> Iterator[Collector]:
    server = grpc.server(ThreadPoolExecutor(2))
    port = server.add_insecure_port("127.0.0.1:0")
    collector = Collector(f"http://127.0.0.1:{port}")
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Traces(collector.spans), server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(
        _Metrics(collector.metrics), server
    )
    server.start()
    try:
        yield collector
    finally:
        server.stop(0.5).wait()


def _values(attributes: Any) -> dict[str, Any]:
    return {
        entry.key: getattr(entry.value, entry.value.WhichOneof("value")) for entry in attributes
    }
