"""Figures of requests that have ended, taken from the router's log, for `/metrics`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import Counter

from kvferry.errors import STATUS
from router.api.event_counts import EventHistogram
from router.request_log import Outcome
from router.timeline import prompt_computed_s

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from router.request_log import RequestRecord

_PHASE_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
_E2E_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


_TIERS = ("device", "host", "decode")
"""Device and lower tiers of whoever computed the prompt: not computed. Decode: not moved."""


class OutcomeMetrics:
    """Counts every request that was accepted for checking, once it has ended."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._e2e = EventHistogram(
            "kvferry_e2e_request_latency_seconds",
            "From a request's arrival to its end, however it ended",
            _E2E_BUCKETS_S,
            registry,
        )
        self._queue = self._phase("request_queue_time", "Waited for a place", "service_class")
        self._prefill = self._phase(
            "request_prefill_time", "The prompt was computed, by whichever worker"
        )
        self._decode = self._phase("request_decode_time", "From the first token to the end")
        self._handoff = self._phase(
            "handoff_wait", "Decoding waited for KV after the first token had come"
        )
        self._requests = self._counter("requests", "Requests by how they ended", "outcome")
        self._retries = self._counter(
            "request_retries", "Attempts that failed before a token and were followed", "reason"
        )
        self._failovers = self._counter(
            "request_failovers", "Attempts that failed amid an answer and were followed", "reason"
        )
        self._hits = self._counter(
            "cache_hit_tokens", "Prompt tokens not computed or not moved, by where they lay", "tier"
        )
        # There from the start: a sum with a series that is not there is nothing.
        for outcome in Outcome:
            if outcome is not Outcome.RUNNING:
                self._requests.labels(outcome.value)
        for kind in (kind for kind, status in STATUS.items() if status.retryable):
            self._retries.labels(kind.value)
            self._failovers.labels(kind.value)
        for tier in _TIERS:
            self._hits.labels(tier)

    def note(self, record: RequestRecord) -> None:
        """One has ended."""
        assert record.ended_at is not None, "told of what has ended"
        trace_id = record.trace.trace_id
        self._requests.labels(record.outcome.value).inc()
        self._e2e.of().observe(record.ended_at - record.arrived_at, trace_id)
        if record.prepared_at is not None and record.placed_at is not None:
            waited_s = record.placed_at - record.prepared_at
            self._queue.of(record.service_class).observe(waited_s, trace_id)
        if record.first_token_at is not None:
            self._decode.of().observe(record.ended_at - record.first_token_at, trace_id)
        self._note_failures(record)
        self._note_prompt(record, trace_id)

    def _note_failures(self, record: RequestRecord) -> None:
        """The last attempt was followed by none."""
        tokens = 0
        for entry in record.attempts[:-1]:
            tokens += entry.tokens
            if entry.error_kind is not None:
                counter = self._failovers if tokens else self._retries
                counter.labels(entry.error_kind.value).inc()

    def _note_prompt(self, record: RequestRecord, trace_id: str) -> None:
        """Of the attempt that brought the first token: later ones compute an answer again."""
        first = next((entry for entry in record.attempts if entry.tokens), None)
        if first is None or first.usage is None:
            return
        usage = first.usage
        hits = (usage.prefill_hit_tokens, usage.host_hit_tokens, usage.decode_hit_tokens)
        for tier, tokens in zip(_TIERS, hits, strict=True):
            self._hits.labels(tier).inc(tokens)
        if usage.moved_tokens:
            self._handoff.of().observe(usage.handoff_ms / 1000.0, trace_id)
        computed_s = prompt_computed_s(first)
        if computed_s is not None:
            self._prefill.of().observe(computed_s, trace_id)

    def _phase(self, name: str, text: str, *labels: str) -> EventHistogram:
        name = f"kvferry_{name}_seconds"
        return EventHistogram(name, text, _PHASE_BUCKETS_S, self._registry, labels)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"kvferry_{name}", text, labels, registry=self._registry)
