"""What is predicted of the first token, and what is learned."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from router.fair_queue import Ahead
from router.fleet_capacity import FleetCapacity, PrefillLane
from router.ttft import Before, TtftModel

TWO_LANES = FleetCapacity(8, None, (PrefillLane(100, 200.0), PrefillLane(300, 200.0)))
UNMEASURED = FleetCapacity(8, None, (PrefillLane(100, 0.0),))


def test_the_least_busy_worker_computes_the_prompt() -> None:
    assert TtftModel().service_s(400, TWO_LANES) == pytest.approx((100 + 400) / 200)


def test_all_workers_together_compute_what_is_before() -> None:
    model = TtftModel()
    # 200 tokens more than the least busy has, 100 on their way, 900 waiting, at 400 a second.
    assert model.plain_wait_s(Before(Ahead(900, 3), 100, 8), TWO_LANES) == pytest.approx(1200 / 400)
    # A worker becomes free a prompt at a time.
    waiting = model.wait_s(Before(Ahead(900, 3), 100, 8), TWO_LANES, 50)
    assert waiting == pytest.approx(1200 / 400 + 50 / 200)


def test_who_finds_room_does_not_wait() -> None:
    assert (
        TtftModel().wait_s(Before(Ahead(), 0, 8), replace(TWO_LANES, lanes=TWO_LANES.lanes[:1]), 50)
        == 0
    )


def test_places_come_free_as_requests_end() -> None:
    model = TtftModel()
    assert model.wait_s(Before(Ahead(0, 20), 0, 0), UNMEASURED, 50) == 0.0
    model.held(4.0)
    assert model.wait_s(Before(Ahead(0, 3), 0, 4), UNMEASURED, 50) == 0.0
    assert model.wait_s(Before(Ahead(0, 15), 0, 0), UNMEASURED, 50) == pytest.approx(16 * 4.0 / 8)


def test_nothing_is_predicted_of_what_was_not_measured() -> None:
    assert TtftModel().service_s(10_000, UNMEASURED) == 0.0


def test_predictions_that_were_short_are_mended() -> None:
    model = TtftModel()
    for _ in range(100):
        model.served(predicted_s=1.0, actual_s=1.5)
    assert model.service_s(100, TWO_LANES) == pytest.approx(1.0 + 0.5, abs=0.01)
    for number in range(100):
        model.served(predicted_s=1.0, actual_s=1.5 + 0.2 * (-1) ** number)
    # About twice the mean deviation on top.
    assert model.service_s(100, TWO_LANES) == pytest.approx(1.0 + 0.5 + 0.4, abs=0.05)


def test_one_wait_in_fifty_is_longer_than_predicted() -> None:
    model, rng, short = TtftModel(), random.Random(3), 0
    waiting = Ahead(600, 0)
    for number in range(4000):
        predicted = model.wait_s(Before(waiting, 0, 8), TWO_LANES, 50)
        rough = model.rough_wait_s(Before(waiting, 0, 8), TWO_LANES, 50)
        actual = rng.uniform(0.5, 2.5) * rough
        short += number >= 1000 and actual > predicted
        model.waited(rough, actual)
    assert 0.01 <= short / 3000 <= 0.03


def test_prompts_that_go_first_are_told_apart() -> None:
    model = TtftModel()
    for _ in range(100):
        model.served(1.0, 3.0, goes_first=False)
        model.served(1.0, 1.0, goes_first=True)
    assert model.service_s(100, TWO_LANES, goes_first=True) == pytest.approx(1.0)
    assert model.service_s(100, TWO_LANES) == pytest.approx(3.0, abs=0.01)


def test_predictions_that_were_long_are_too() -> None:
    model = TtftModel()
    for _ in range(100):
        model.served(predicted_s=5.0, actual_s=1.0)
    assert model.service_s(100, TWO_LANES) == 0.0
