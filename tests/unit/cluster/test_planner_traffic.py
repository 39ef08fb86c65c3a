"""What a planner hears of requests and workers between two looks."""

from __future__ import annotations

import pytest

from cluster.planner_capacity import Targets
from cluster.planner_input import DecodeSteps, Latency
from cluster.planner_traffic import TrafficMeter, WorkerMeter
from kvferry.accounts import KvAccounts, WorkerLoad
from kvferry.clock import ManualClock
from kvferry.generation import AttemptUsage
from kvferry.ids import Attempt, Incarnation, RequestId, WorkerId
from kvferry.membership import Role, WorkerInfo
from kvferry.tracing_config import TracingConfig
from router.fleet import WorkerSummary
from router.prefix_index import IndexedWorker
from router.request import Usage
from router.request_log import Outcome, RequestLog, RequestRecord
from router.worker_client import WorkerStatus
from tests.support.request_records import attempt_record, request_record

TARGETS = Targets(ttft_s=2.0, itl_s=0.1, attainment=0.9)
DECODE = WorkerId("decode-0")


class Log(RequestLog):
    """Records that tests write themselves."""

    def __init__(self) -> None:
        super().__init__(ManualClock(), TracingConfig())
        self.records: dict[str, RequestRecord] = {}

    def running(self) -> tuple[RequestRecord, ...]:
        return tuple(self.records.values())

    def add(self, name: str, record: RequestRecord) -> RequestRecord:
        record.request_id = RequestId(name)
        self.records[name] = record
        return record

    def end(self, name: str, outcome: Outcome = Outcome.SUCCEEDED) -> None:
        record = self.records.pop(name)
        record.outcome = outcome
        for tell in self.on_end:
            tell(record)


def usage(itl_ms: float) -> Usage:
    kv = AttemptUsage(0, 0, 0, 0, 0.0)
    return Usage(100, 10, Attempt(1), DECODE, None, kv, 500.0, itl_ms)


def running(arrived_at: float, tokens: int = 0, **attempt: float) -> RequestRecord:
    fields = {"started_at": arrived_at + 0.5, "prefill_tokens": 300, "tokens": tokens} | attempt
    return request_record(attempt_record(**fields), arrived_at=arrived_at, outcome=Outcome.RUNNING)


def test_each_token_prompt_and_arrival_counts_in_one_interval() -> None:
    log = Log()
    meter = TrafficMeter(log, TARGETS, now=0.0)
    one = log.add("one", running(1.0, tokens=5))
    log.add("two", running(1.5, tokens=0))
    seen = meter.look(2.0)
    assert (seen.requests, seen.prompts, seen.prompt_tokens, seen.answer_tokens) == (2, 2, 600, 5)
    assert seen.prompt_tokens_squared == 2 * 300.0**2
    one.attempts[0].tokens = 12
    log.end("one")
    seen = meter.look(4.0)
    assert (seen.requests, seen.prompts, seen.answer_tokens, seen.answers) == (0, 0, 7, 1)
    assert seen.seconds == 2.0
    again = meter.look(6.0)
    assert (again.requests, again.answer_tokens, again.answers) == (0, 0, 0)


def test_first_tokens_of_the_interval_and_who_was_refused() -> None:
    log = Log()
    meter = TrafficMeter(log, TARGETS, now=0.0)
    log.add("fast", running(1.0, first_token_at=2.0))
    log.add("slow", running(1.0, first_token_at=4.5))
    log.add("none", running(1.0))
    log.add("refused", request_record(arrived_at=1.0, placed_at=None))
    log.end("refused", Outcome.REFUSED)
    seen = meter.look(5.0)
    assert seen.requests == 4
    assert seen.ttft == Latency(count=3, kept=1, p50_s=1.0, p90_s=3.5)
    assert seen.ttft.attainment == pytest.approx(1 / 3)
    assert meter.look(6.0).ttft == Latency()


def test_what_was_wrong_with_itself_is_no_load() -> None:
    log = Log()
    meter = TrafficMeter(log, TARGETS, now=0.0)
    log.add("bad", request_record(arrived_at=1.0))
    log.end("bad", Outcome.FAILED)
    assert meter.look(2.0).requests == 0


def test_times_between_tokens_are_of_answers_that_ended() -> None:
    log = Log()
    meter = TrafficMeter(log, TARGETS, now=0.0)
    for number, itl_ms in enumerate((50.0, 90.0, 150.0)):
        log.add(f"r{number}", running(1.0, tokens=10)).usage = usage(itl_ms)
        log.end(f"r{number}")
    assert meter.look(2.0).itl == Latency(count=3, kept=2, p50_s=0.09, p90_s=0.15)


def test_who_waits_for_a_place_and_who_decodes() -> None:
    log = Log()
    meter = TrafficMeter(log, TARGETS, now=0.0)
    log.add("waits", request_record(arrived_at=1.0, placed_at=None, outcome=Outcome.RUNNING))
    log.add("unprepared", request_record(arrived_at=1.0, prepared_at=None, placed_at=None))
    log.add("prompt", running(1.0))
    log.add("decodes", running(1.0, first_token_at=2.0))
    moved = log.add("moved", running(1.0, first_token_at=2.0, ended_at=2.5))
    moved.attempts.append(
        attempt_record(decode_worker=WorkerId("decode-1"), started_at=2.6, first_token_at=2.8)
    )
    assert meter.look(3.0).waiting == 1
    assert meter.decoding() == {DECODE: 1, "decode-1": 1}


def test_a_meter_that_is_closed_hears_nothing_more() -> None:
    log = Log()
    meter = TrafficMeter(log, TARGETS, now=0.0)
    meter.close()
    assert log.on_end == []


def summary(steps: int, sequences: int, us: int, incarnation: int = 1) -> WorkerSummary:
    counters = {"decode_steps": steps, "decode_step_sequences": sequences, "decode_step_us": us}
    status = WorkerStatus(
        Incarnation(incarnation),
        WorkerLoad(running=3, waiting_tokens=70, prefill_tokens_per_s=400.0),
        KvAccounts(10, 20, 30, 40, 0, 100, 0, 0, 8),
        None,
        1,
        counters,
    )
    info = WorkerInfo(DECODE, Role.DECODE, Incarnation(incarnation), "a:1")
    return WorkerSummary(info, True, status, IndexedWorker(0, None, False), None)


def test_workers_tell_what_they_counted_since_the_last_look() -> None:
    meter = WorkerMeter()
    (first,) = meter.look(
        [summary(1000, 5000, 9_000_000)], TrafficMeter(Log(), TARGETS, 0.0).decoding()
    )
    assert first.decode == DecodeSteps(0, 0, 0.0)
    assert (first.prompt_tokens, first.prefill_tokens_per_s, first.kv_share) == (70, 400.0, 0.7)
    decoding = TrafficMeter(Log(), TARGETS, 0.0).decoding()
    decoding[DECODE] = 5
    (second,) = meter.look([summary(1010, 5060, 9_150_000)], decoding)
    assert second.decode == DecodeSteps(10, 60, 0.15)
    assert second.decoding == 5
    (restarted,) = meter.look([summary(7, 7, 7, incarnation=2)], decoding)
    assert restarted.decode == DecodeSteps(0, 0, 0.0)
