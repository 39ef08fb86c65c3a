"""What workers can do within targets, against queues that are played."""

from __future__ import annotations

import heapq
import math
import random

import pytest

from cluster.planner_capacity import (
    DecodeCapacity,
    PromptCapacity,
    PromptRate,
    StepTime,
    Targets,
)
from cluster.planner_demand import Demand
from cluster.planner_input import DecodeSteps, WorkerSeen
from kvferry.ids import WorkerId
from kvferry.membership import Role

TARGETS = Targets(ttft_s=2.0, itl_s=0.025, attainment=0.9)


def demand(
    prompt_tokens_per_s: float = 0.0, answer_tokens_per_s: float = 0.0, **other: float
) -> Demand:
    fields = {
        "prompt_tokens": 4000.0,
        "prompt_variation": 0.284,
        "answer_tokens": 300.0,
        "backlog_tokens": 0.0,
        "sequences": 0.0,
    } | other
    return Demand(
        prompt_tokens_per_s=prompt_tokens_per_s, answer_tokens_per_s=answer_tokens_per_s, **fields
    )


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_at_a_load_of_one_a_queue_of_prompts_about_keeps_the_target(workers: int) -> None:
    """First come, first served, lengths as described: nine in ten within the target, with some
    room for what the formula leaves out."""
    capacity = PromptCapacity(8000.0)
    per_s = next(
        rate / 100.0
        for rate in range(10_000, 0, -1)
        if capacity.load(demand(rate / 100.0 * 4000.0), workers, TARGETS) <= 1.0
    )
    rng = random.Random(1)
    free = [0.0] * workers
    now, kept, count = 0.0, 0, 20_000
    for _ in range(count):
        now += rng.expovariate(per_s)
        tokens = 4000.0 * rng.lognormvariate(-0.125, 0.5)
        done = max(now, heapq.heappop(free)) + tokens / 8000.0
        heapq.heappush(free, done)
        kept += done - now <= TARGETS.ttft_s
    assert 0.85 <= kept / count <= 0.97


def test_more_workers_are_loaded_less_and_none_endlessly() -> None:
    capacity = PromptCapacity(8000.0)
    loads = [capacity.load(demand(20_000.0), workers, TARGETS) for workers in range(9)]
    assert loads[0] == math.inf
    assert loads == sorted(loads, reverse=True)
    assert capacity.load(demand(0.0, prompt_tokens=0.0), 0, TARGETS) == 0.0


def test_prompts_that_wait_already_count_besides() -> None:
    capacity = PromptCapacity(8000.0)
    plain = capacity.load(demand(10_000.0), 4, TARGETS)
    assert capacity.load(demand(10_000.0, backlog_tokens=5_000.0), 4, TARGETS) == plain
    assert capacity.load(demand(10_000.0, backlog_tokens=60_000.0), 4, TARGETS) == pytest.approx(
        plain * 2.0
    )


def test_prompts_longer_than_the_target_leave_room_for_the_others() -> None:
    load = PromptCapacity(1000.0).load(demand(2000.0), 4, TARGETS)
    assert 0.0 < load < math.inf


def test_sequences_per_worker_are_what_the_target_allows() -> None:
    line = (0.008, 0.0003)
    capacity = DecodeCapacity.of(line, 64, TARGETS)
    assert capacity.sequences == pytest.approx(17.0 / 0.3)
    assert capacity.step_s == pytest.approx(TARGETS.itl_s)
    assert DecodeCapacity.of(line, 16, TARGETS) == DecodeCapacity(16.0, pytest.approx(0.0128))
    # Not even one is within the target: there has to be one.
    assert DecodeCapacity.of((0.05, 0.01), 64, TARGETS).sequences == 1.0


def test_answers_load_workers_by_their_number_or_by_what_they_ask_for() -> None:
    capacity = DecodeCapacity(50.0, 0.025)
    by_rate = capacity.load(demand(answer_tokens_per_s=4000.0), 4, TARGETS)
    assert by_rate == capacity.load(demand(sequences=100.0), 4, TARGETS)
    # 200 places less the spread of a random number of about as many.
    assert by_rate == pytest.approx(100.0 / (200.0 - 1.28 * math.sqrt(183.0)), rel=0.01)
    assert capacity.load(demand(sequences=1.0), 0, TARGETS) == math.inf


def test_the_time_of_a_step_is_a_line_through_what_steps_took() -> None:
    times = StepTime()
    assert times.line is None
    times.learn([DecodeSteps(100, 100 * 10, 100 * 0.011)], 2.0)
    base_s, sequence_s = times.line or (0.0, 0.0)
    assert base_s + 10 * sequence_s == pytest.approx(0.011)
    for n in (10, 30, 50):
        times.learn([DecodeSteps(100, 100 * n, 100 * (0.008 + 0.0003 * n)), DecodeSteps()], 2.0)
    base_s, sequence_s = times.line or (0.0, 0.0)
    assert base_s == pytest.approx(0.008, rel=0.05)
    assert sequence_s == pytest.approx(0.0003, rel=0.05)


def test_what_steps_took_long_ago_is_forgotten() -> None:
    times = StepTime()
    for n in (10, 30, 50):
        times.learn([DecodeSteps(100, 100 * n, 100 * (0.02 + 0.001 * n))], 2.0)
    for _ in range(300):
        for n in (10, 30, 50):
            times.learn([DecodeSteps(100, 100 * n, 100 * (0.008 + 0.0003 * n))], 2.0)
    base_s, sequence_s = times.line or (0.0, 0.0)
    assert base_s == pytest.approx(0.008, rel=0.01)
    assert sequence_s == pytest.approx(0.0003, rel=0.01)


def test_who_is_slow_beside_answers_is_not_taken_for_slow_without() -> None:
    rate = PromptRate()

    def learn(**rates: float) -> float:
        workers = [
            WorkerSeen(WorkerId(name), Role.PREFILL, prefill_tokens_per_s=measured)
            for name, measured in rates.items()
        ]
        rate.learn(workers, 2.0)
        return rate.tokens_per_s

    assert learn(a=0.0) == 0.0
    assert learn(a=8000.0, b=0.0) == 8000.0
    assert learn(a=800.0, b=6000.0) == pytest.approx(7000.0, rel=0.02)
    for _ in range(300):
        slow = learn(a=800.0, b=6000.0)
    assert slow == pytest.approx(3400.0)
    assert learn(b=6000.0) == 6000.0
