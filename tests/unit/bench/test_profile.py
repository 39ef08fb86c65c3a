"""A profile of a pretended server, whose clock and counters are known."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from bench.profile import ProfilePlan, Profiler
from kvferry.clock import ManualClock
from kvferry.errors import KvferryError, WorkerUnavailable
from kvferry.rpc.v1 import inference_pb2 as inference

if TYPE_CHECKING:
    from collections.abc import Iterator

CHUNK = 128
PLAN = ProfilePlan(
    chunk_tokens=CHUNK,
    page_size=16,
    status_interval_s=0.5,
    prompt_tokens=(40, 300),
    rounds=1,
    batches=(1, 2),
    contexts=(64,),
    answer_tokens=5,
    beside_rounds=1,
    beside_prompt_tokens=100,
    beside_answer_tokens=8,
)


class PretendedServer:
    """One prefill and one decode worker; 1 ms a token of a prompt, 100 ms a step, one at a time."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.lock = threading.Lock()
        self.computed: dict[str, float] = {}
        self.seen: list[tuple[int, ...]] = []
        self.steps = 0
        self.in_flight = 0
        self.tells_time = True

    def generate(self, request: inference.GenerateRequest) -> Iterator[inference.GenerateResponse]:
        with self.lock:
            ids = tuple(request.token_ids.ids)
            shared = max((_shared(ids, other) for other in self.seen), default=0)
            hit = min(shared, len(ids) - 1) // 16 * 16
            self.seen.append(ids)
            self.computed[request.request_id] = (len(ids) - hit) / 1000
            self.clock.advance(0.01 + (len(ids) - hit) / 1000)
            self.steps += request.sampling.max_tokens - 1
        yield inference.GenerateResponse(token_ids=[1])
        usage = inference.Usage(
            prompt_tokens=len(ids), prefill_hit_tokens=hit, moved_tokens=16, moved_bytes=1600
        )
        usage.handoff_ms = 2.0
        yield inference.GenerateResponse(finish=inference.Finish(usage=usage))

    def cluster_status(self) -> inference.ClusterStatusResponse:
        counters = {
            "decode_steps": self.steps,
            "decode_step_sequences": self.steps,
            "decode_step_us": 100_000 * self.steps,
        }
        load = inference.WorkerLoad(link_bytes_per_s=5e8)
        return inference.ClusterStatusResponse(
            requests_in_flight=self.in_flight,
            workers=[
                inference.WorkerSummary(role="prefill"),
                inference.WorkerSummary(role="decode", counters=counters, load=load),
            ],
        )

    def traces(self, name: str, count_max: int) -> inference.TracesResponse:
        if not self.tells_time:
            return inference.TracesResponse()
        prefill = inference.TraceSpan(name="prefill", start_s=1.0, end_s=1.0 + self.computed[name])
        attempt = inference.TraceSpan(name="attempt 1", start_s=0.004, children=[prefill])
        span = inference.TraceSpan(name="request", children=[attempt])
        return inference.TracesResponse(requests=[inference.RequestTrace(span=span)])


def _shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length


def profiler() -> tuple[PretendedServer, Profiler]:
    clock = ManualClock()
    server = PretendedServer(clock)
    return server, Profiler(server, PLAN, clock, clock.advance, lambda text: None)


def test_everything_is_counted_where_it_arises():
    _, measuring = profiler()
    found = measuring.run()
    shapes = [(each.tokens, each.steps) for each in found.prompts]
    assert shapes == [(40, 1), (24, 1), (300, 3), (156, 2)]
    contexts = [each.token_contexts for each in found.prompts]
    assert contexts == [sum(range(40)), sum(range(16, 40)), sum(range(300)), sum(range(144, 300))]
    for each in found.prompts:
        assert each.computed_s == pytest.approx(each.tokens / 1000)
        assert each.ttft_s == pytest.approx(0.01 + each.computed_s)
        assert (each.before_s, each.handoff_s) == (pytest.approx(0.004), 0.002)
        assert (each.moved_tokens, each.moved_bytes) == (16, 1600)
    alone, two = found.answers
    assert (alone.steps, alone.sequences, alone.seconds) == (4, 4, pytest.approx(0.4))
    # Of 64 tokens and, in the mean, half of the answer.
    assert alone.context_tokens == 4 * 66.5
    assert two.sequences == 8
    assert found.others == 1
    # Eight tokens at 100 ms each are as long as eight such prompts.
    assert len(found.prompts_beside) == 8
    assert found.workers == {"prefill": 1, "decode": 1}
    assert found.link_bytes_per_s == 5e8


def test_a_cluster_that_others_use_is_refused():
    server, measuring = profiler()
    server.in_flight = 1
    with pytest.raises(KvferryError, match="not idle"):
        measuring.run()


def test_a_server_without_timelines_is_refused():
    server, measuring = profiler()
    server.tells_time = False
    with pytest.raises(WorkerUnavailable, match="timeline"):
        measuring.run()
