"""The simulated cluster of `benchmarks.planner`: it keeps its books, and the planner helps it."""

from __future__ import annotations

import math
import random

import pytest

from benchmarks.planner import contenders, play
from benchmarks.planner_load import Asked, arrivals, rates_of, shape_of
from benchmarks.planner_sim import PlannerSim, Timing
from cluster.planner_capacity import Targets

TIMING = Timing()
TARGETS = Targets(ttft_s=2.0, itl_s=0.025, attainment=0.9)


def test_a_request_alone_takes_the_time_of_its_steps() -> None:
    asked = Asked(at=1.0, prompt=4096, answer=11)
    PlannerSim(TIMING, (1, 1), TARGETS).run([asked])
    prompt_s = 2 * TIMING.prompt_step_s + 4096 * TIMING.prompt_token_s
    assert asked.ttft_s == pytest.approx(prompt_s)
    move_s = TIMING.move_token_s * 4096
    step_s = TIMING.step_s + TIMING.sequence_s + TIMING.context_token_s * 4100
    assert asked.itl_s * 10 == pytest.approx(move_s + 10 * step_s, rel=0.01)


def test_what_is_refused_or_cut_off_has_no_end() -> None:
    load = [Asked(at=0.01 * number, prompt=8000, answer=50) for number in range(40)]
    PlannerSim(TIMING, (1, 1), TARGETS).run(load)
    ended = [each for each in load if each.ended_at is not None]
    refused = [each for each in load if each.first_at is None]
    assert len(ended) + len(refused) == 40
    assert refused
    assert all(each.ttft_s == math.inf for each in refused)


def test_on_a_swing_the_planner_beats_every_fixed_ratio() -> None:
    workers, seconds = 4, 120.0
    rates = rates_of(workers, TIMING, TARGETS)
    rng = random.Random("swing")
    shape = shape_of("square-80", rng, seconds)
    load = list(arrivals(shape, (0.9 * rates[0], 0.9 * rates[1]), seconds, rng))
    played = {name: play(load, name, split) for name, split in contenders(workers).items()}
    planned = played.pop("planner")
    best = max(each.both for each in played.values())
    assert planned.switches >= 4
    assert planned.both > 1.05 * best, (planned, played)
    assert all(each.switches == 0 for each in played.values())
