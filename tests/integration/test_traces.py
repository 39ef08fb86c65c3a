"""Where the time of a request went, as told by real workers over real gRPC."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import pytest

from cluster.client import Client
from kvferry.config import SchedulerConfig
from kvferry.membership import Role
from kvferry.rpc.v1 import inference_pb2 as inference
from kvferry.tracing_config import TracingConfig
from router.span_export import open_export
from tests.support.collector import running_collector
from tests.support.cutting_client import Cuts
from tests.support.digest_cluster import digest_cluster, digest_config

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.in_process_cluster import InProcessCluster

PROMPT = list(range(20, 61))
HANDOFF = ["wait", "handoff", "prefill.queue", "prefill", "transfer", "decode"]


class Arena:
    """A cluster whose attempts can be cut off, and what its router remembers."""

    def __init__(self, cluster: InProcessCluster, cuts: Cuts) -> None:
        self.cluster = cluster
        self.cuts = cuts
        self._asked = 0

    def ask(
        self, name: str, *cuts: int, traceparent: str = "", **sampling: object
    ) -> inference.RequestTrace:
        """Ask for an answer of 8 tokens; what is remembered of it then."""
        self.cuts.after.extend(cuts)
        self._asked += 1
        # A beginning of its own: what moves does not depend on which tests ran before.
        ids = [100 + self._asked, *PROMPT[1:]]
        params = {"max_tokens": 8, "ignore_eos": True, "temperature": 0.0}
        request = inference.GenerateRequest(
            request_id=name,
            token_ids=inference.TokenIds(ids=ids),
            sampling=inference.SamplingParams(**params | sampling),
        )
        metadata = [("traceparent", traceparent)] if traceparent else []
        list(self.cluster.stub.Generate(request, timeout=60, metadata=metadata))
        with Client(self.cluster.address) as client:
            (trace,) = client.traces(name, 1).requests
        return trace


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    cuts = Cuts()
    config = digest_config(8, 512, scheduler=SchedulerConfig(chunk_tokens=16))
    roles = [Role.PREFILL, Role.DECODE, Role.DECODE]
    with digest_cluster(config, roles, cuts.connect) as cluster:
        yield Arena(cluster, cuts)


def _names(span: inference.TraceSpan) -> list[str]:
    return [name for child in span.children for name in (child.name, *_names(child))]


def _check_nesting(span: inference.TraceSpan) -> None:
    """Every span ends, lies within its parent, and begins after those it waits for."""
    assert span.start_s <= span.end_s
    for child in span.children:
        # What a worker tells is put into what the router saw with half of the way as error.
        assert child.start_s >= span.start_s - 1e-6, child.name
        assert child.end_s <= span.end_s + 0.02, child.name
        _check_nesting(child)


def test_a_request_is_told_phase_by_phase(arena: Arena) -> None:
    trace = arena.ask("whole")
    assert trace.outcome == "succeeded"
    assert [child.name for child in trace.span.children] == [
        *("tokenize", "queue", "route", "attempt 1"),
    ]
    attempt = trace.span.children[-1]
    assert _names(attempt) == HANDOFF
    assert attempt.attributes["kvferry.attempt.tokens"] == "8"
    assert attempt.attributes["kvferry.handoff.tokens"] == str(len(PROMPT))
    _check_nesting(trace.span)
    places = {
        child.name: child.place for child in (*attempt.children, *attempt.children[1].children)
    }
    decode_worker = attempt.attributes["kvferry.decode.worker"]
    assert places["prefill"] == "prefill-0"
    assert places["decode"] == places["handoff"] == decode_worker
    assert trace.duration_s == pytest.approx(trace.span.end_s)


def test_a_failed_over_request_shows_both_attempts(arena: Arena) -> None:
    trace = arena.ask("twice", 3)
    first, second = (each for each in trace.span.children if each.name.startswith("attempt"))
    assert (first.error_kind, first.error) == ("unavailable", "cut off")
    assert (second.error_kind, second.error) == ("", "")
    assert first.attributes["kvferry.attempt.tokens"] == "3"
    assert second.attributes["kvferry.attempt.tokens"] == "5"
    workers = {each.attributes["kvferry.decode.worker"] for each in (first, second)}
    assert len(workers) == 2
    # The first one never came to tell of its end; what it had told is there.
    assert _names(first) == _names(second) == HANDOFF
    assert trace.span.attributes["kvferry.request.failed_attempts"] == "1"
    _check_nesting(trace.span)


def test_several_samples_and_stop_strings_have_their_phases(arena: Arena) -> None:
    trace = arena.ask("samples", n=3, temperature=2.0, seed=5)
    attempt = trace.span.children[-1]
    assert _names(attempt) == HANDOFF
    assert attempt.attributes["kvferry.attempt.tokens"] == "24"
    assert trace.span.attributes["gen_ai.response.finish_reasons"] == "length, length, length"


def test_the_latest_come_first(arena: Arena) -> None:
    for number in range(3):
        arena.ask(f"row-{number}")
    with Client(arena.cluster.address) as client:
        listed = client.traces("", 2).requests
    assert [trace.request_id for trace in listed] == ["row-2", "row-1"]


def test_an_unknown_request_and_a_senseless_count_are_refused(arena: Arena) -> None:
    for message, code, word in (
        (inference.TracesRequest(name="never"), grpc.StatusCode.NOT_FOUND, "'never'"),
        (inference.TracesRequest(count_max=0), grpc.StatusCode.INVALID_ARGUMENT, "count_max"),
        (inference.TracesRequest(count_max=10**6), grpc.StatusCode.INVALID_ARGUMENT, "count_max"),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            arena.cluster.admin.Traces(message, timeout=20)
        assert refused.value.code() is code
        assert word in refused.value.details()


def test_a_collector_gets_both_attempts_of_the_clients_trace(arena: Arena) -> None:
    trace_id, client = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with running_collector() as collector:
        export = open_export(TracingConfig(otlp_endpoint=collector.endpoint), "a-model")
        arena.cluster.router.log.on_end.append(export.note)
        trace = arena.ask("sent", 3, traceparent=f"00-{trace_id}-{client}-01")
        arena.ask("not sent", traceparent=f"00-{trace_id[::-1]}-{client}-00")
        arena.cluster.router.log.on_end.remove(export.note)
        export.close()
    assert trace.trace_id == trace_id
    assert {each.span.trace_id.hex() for each in collector.spans} == {trace_id}
    root = next(each for each in collector.spans if each.service == "kvferry-router")
    assert root.span.parent_span_id.hex() == client
    attempts = [each for each in collector.spans if each.span.name.startswith("attempt")]
    assert [each.span.name for each in attempts] == ["attempt 1", "attempt 2"]
    assert [each.attributes.get("error.type") for each in attempts] == ["unavailable", None]
    instances = {each.instance for each in collector.spans}
    assert instances == {"router", "prefill-0", "decode-1", "decode-2"}
    names = [each.span.name for each in collector.spans]
    assert names.count("transfer") == names.count("handoff") == 2
