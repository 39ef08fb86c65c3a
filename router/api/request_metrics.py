"""Figures of the requests that clients make, over whatever protocol, for `/metrics`."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter

from kvferry.errors import KvferryError
from router.api.event_counts import EventCounter, EventHistogram, EventSeries
from router.api.outcome_metrics import OutcomeMetrics

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from kvferry.clock import Clock
    from router.request import ClientRequest, ResponseChunk, Usage
    from router.router import Router

_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ITL_BUCKETS_S = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)


class RequestMetrics:
    """Counts requests as they pass. One of a router, shared by its front doors."""

    def __init__(self, router: Router, clock: Clock) -> None:
        self._router = router
        self.config = router.config
        self._clock = clock
        self.registry = CollectorRegistry()
        self._ttft = self._histogram(
            "time_to_first_token", "From a request's arrival to its first token", _TTFT_BUCKETS_S
        )
        self._itl = self._histogram(
            "inter_token_latency", "Between two pieces of one sample, per token", _ITL_BUCKETS_S
        )
        router.log.on_end.append(OutcomeMetrics(self.registry).note)
        self._success = self._counter(
            "request_success", "Samples that ended without an error", "finished_reason"
        )
        self._failures = self._counter(
            "request_failures", "Requests that ended in an error, or whose client left", "kind"
        )
        self._prompt = self._counter("prompt_tokens", "Of requests that succeeded")
        self._generated = EventCounter(
            "kvferry_generation_tokens", "Shown to clients", self.registry
        )
        self._queries = self._counter("prefix_cache_queries", "Prompt tokens looked up")
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens nobody had to compute")
        self._moved = self._counter("handoff_bytes", "KV moved between workers")

    async def generate(self, request: ClientRequest) -> AsyncGenerator[ResponseChunk, None]:
        """What the router generates, counted. Raises what it raises."""
        arrived = self._clock.now()
        last_of: dict[int, float] = {}
        try:
            async with contextlib.aclosing(self._router.generate(request)) as chunks:
                async for chunk in chunks:
                    self._note(chunk, arrived, last_of)
                    yield chunk
        except KvferryError as error:
            self._failures.labels(error.kind.value).inc()
            raise
        except (GeneratorExit, asyncio.CancelledError):
            self._failures.labels("client_gone").inc()
            raise

    def _note(self, chunk: ResponseChunk, arrived: float, last_of: dict[int, float]) -> None:
        if chunk.tokens:
            now = self._clock.now()
            last = last_of.get(chunk.index)
            if last is not None:
                self._itl.observe((now - last) / len(chunk.tokens))
            elif not last_of:
                record = self._router.log.in_flight(chunk.request_id)
                self._ttft.observe(now - arrived, "" if record is None else record.trace.trace_id)
            last_of[chunk.index] = now
            self._generated.inc(len(chunk.tokens))
        if chunk.finish is not None:
            self._success.labels(chunk.finish.reason.value).inc()
            if chunk.finish.usage is not None:
                self._note_usage(chunk.finish.usage)

    def _note_usage(self, usage: Usage) -> None:
        self._prompt.inc(usage.prompt_tokens)
        self._queries.inc(usage.prompt_tokens)
        self._hits.inc(usage.kv.prefill_hit_tokens + usage.kv.host_hit_tokens)
        self._moved.inc(usage.kv.moved_bytes)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"kvferry_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> EventSeries:
        return EventHistogram(f"kvferry_{name}_seconds", text, buckets, self.registry).of()
