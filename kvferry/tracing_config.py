"""The settings of traces: how many requests a router remembers, and where it sends their spans."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TracingConfig:
    """What routers remember of requests, and whom they tell."""

    requests_kept: int = 1000
    """Ended requests that a router remembers for `kvferry trace` and the console, about 3 kB each;
    and as many of those that were refused."""
    otlp_endpoint: str = ""
    """Where spans go, by OTLP over gRPC, such as http://127.0.0.1:4317. Empty: nowhere. Needs the
    extra `otel`."""
    sample_ratio: float = 1.0
    """Share of the traces that begin here and are sent; of others their client decides."""
