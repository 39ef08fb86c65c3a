"""Prompts that go first: between two steps, before prompts that were begun, and not for ever."""

from __future__ import annotations

import pytest

from engine.prompt_order import PASSED_OVER_MAX
from engine.request import Request, Stage
from kvferry.config import SchedulerConfig
from tests.support.engine_bench import EngineBench


def bench(running_max: int = 8) -> EngineBench:
    config = SchedulerConfig(chunk_tokens=8, running_max=running_max)
    return EngineBench(num_slots=1024, radix=False, scheduler=config)


def submit(engine: EngineBench, name: str, tokens: int, *, first: bool = False) -> Request:
    request = engine.request(name, [9] * tokens, max_tokens=1)
    request.goes_first = first
    engine.engine.submit(request)
    return request


def steps_until_done(engine: EngineBench, request: Request) -> int:
    for step in range(200):
        if request.stage is Stage.ENDED:
            return step
        engine.engine.step()
    raise AssertionError(f"{request.id} is {request.stage}")


@pytest.mark.parametrize(("first", "steps"), [(True, 2), (False, 10)])
def test_a_prompt_that_goes_first_waits_for_a_step_and_not_for_a_prompt(
    first: bool, steps: int
) -> None:
    engine = bench()
    long = submit(engine, "long", 72)
    engine.engine.step()
    short = submit(engine, "s", 12, first=first)
    assert steps_until_done(engine, short) == steps
    engine.run()
    assert long.stage is Stage.ENDED
    engine.assert_idle()


def test_those_that_wait_for_room_are_ordered_alike() -> None:
    engine = bench(running_max=1)
    submit(engine, "running", 16)
    engine.engine.step()
    submit(engine, "older", 8)
    for name in ("first", "second"):
        submit(engine, name, 8, first=True)
    engine.run()
    assert list(engine.recorder.ends) == ["running", "first", "second", "older"]


def test_who_was_passed_over_often_enough_goes_before_later_ones() -> None:
    engine = bench()
    waiting = submit(engine, "waiting", 16)
    for number in range(PASSED_OVER_MAX):
        submit(engine, f"first{number}", 8, first=True)
        engine.engine.step()
        assert waiting.uncomputed == 16
        assert waiting.passed_over == number + 1
    late = submit(engine, "late", 8, first=True)
    assert steps_until_done(engine, waiting) == 2
    assert late.stage is not Stage.ENDED
    engine.run()
    engine.assert_idle()


def test_what_is_left_of_a_step_is_given_to_the_next_one() -> None:
    engine = bench()
    older = submit(engine, "older", 32)
    submit(engine, "first", 6, first=True)
    engine.engine.step()
    assert older.uncomputed == 30
    assert older.passed_over == 0
