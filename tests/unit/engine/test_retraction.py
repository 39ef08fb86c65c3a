"""Decoding under pressure: who loses its KV, who gets it back, and that nobody can tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from engine.request import Request, Stage
from kvferry.config import SchedulerConfig
from tests.support.digest_model import VOCAB, answer
from tests.support.engine_bench import EngineBench

if TYPE_CHECKING:
    from kvferry.generation import OutputToken

OPTIMIST = SchedulerConfig(output_reserve=0.0)
"""Promises the prompt alone: answers always outrun it."""


def _prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(10, VOCAB, length).tolist()


def _prompts(count: int) -> dict[str, list[int]]:
    shared = _prompt(99, 16)
    return {f"r{n}": shared[: 16 * (n % 2)] + _prompt(n, 8 + n * 7 % 30) for n in range(count)}


def _slots_wanted(prompts: dict[str, list[int]], max_tokens: int, page_size: int) -> int:
    """Slots that all requests together want at their ends."""
    lengths = (len(prompt) + max_tokens - 1 for prompt in prompts.values())
    return sum(-(-length // page_size) * page_size for length in lengths)


@pytest.mark.parametrize("radix", [True, False], ids=["radix", "chunk"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_pool_of_an_eighth_answers_everyone_as_if_alone(page_size: int, radix: bool) -> None:
    prompts = _prompts(16)
    slots = _slots_wanted(prompts, 24, page_size) // 8 // page_size * page_size
    bench = EngineBench(
        page_size=page_size, num_slots=slots, rows=32, radix=radix, scheduler=OPTIMIST
    )
    requests = [bench.submit(n, prompt, max_tokens=24) for n, prompt in prompts.items()]
    bench.run(5000)
    assert bench.recorder.told == {name: answer(p, 24) for name, p in prompts.items()}
    assert bench.engine.scheduler.counters["retractions"] > 0, "there was no pressure"
    assert sum(request.retractions for request in requests) <= len(requests)
    bench.assert_idle()


@pytest.mark.parametrize("page_size", [1, 16])
def test_seeded_sampling_goes_on_after_a_retraction(page_size: int) -> None:
    prompts = _prompts(6)
    told = []
    for slots, rows in ((4096, 32), (_slots_wanted(prompts, 20, page_size) // 3 // 16 * 16, 32)):
        bench = EngineBench(page_size=page_size, num_slots=slots, rows=rows, scheduler=OPTIMIST)
        said: dict[str, list[OutputToken]] = {}
        original = bench.recorder.tokens

        def tokens(request: Request, tokens: tuple, said=said, original=original) -> None:
            said.setdefault(request.id.request_id, []).extend(tokens)
            original(request, tokens)

        bench.recorder.tokens = tokens
        for seed, (name, prompt) in enumerate(prompts.items()):
            bench.submit(
                name,
                prompt,
                max_tokens=20,
                min_tokens=12,
                temperature=3.0,
                seed=seed,
                presence_penalty=0.5,
                frequency_penalty=0.2,
                repetition_penalty=1.1,
                logprobs=2,
                stop_token_ids=tuple(range(30)),
            )
        bench.run(5000)
        bench.assert_idle()
        told.append((said, bench.recorder.ends, bench.engine.scheduler.counters["retractions"]))
    alone, pressed = told
    assert (alone[2], pressed[2] > 0) == (0, True)
    assert pressed[:2] == alone[:2]
    assert len({tuple(t.token_id for t in tokens) for tokens in alone[0].values()}) == len(prompts)


def _step_until_retraction(bench: EngineBench) -> None:
    for _ in range(200):
        assert bench.engine.step()
        if bench.engine.scheduler.counters["retractions"]:
            return
    raise AssertionError("nobody was retracted")


def test_youngest_is_retracted_and_keeps_its_place_in_the_queue() -> None:
    bench = EngineBench(page_size=1, num_slots=64, scheduler=OPTIMIST)
    first, second, third = (bench.submit(f"r{n}", _prompt(n, 16), max_tokens=40) for n in range(3))
    bench.engine.step()
    late = bench.submit("late", _prompt(9, 16), max_tokens=40)
    _step_until_retraction(bench)
    assert [r.stage for r in (first, second, third, late)] == [
        Stage.DECODING,
        Stage.DECODING,
        Stage.WAITING,
        Stage.WAITING,
    ]
    assert third.num_tokens > third.prompt_len
    assert third.kv is None
    order: list[str] = []
    bench.recorder.admitted = lambda request: order.append(request.id.request_id)
    bench.run()
    # It is told of its admission once only, the first time.
    assert order == ["late"]
    assert [r.retractions for r in (first, second, third, late)] == [0, 1, 1, 0]
    ends = list(bench.recorder.ends)
    assert ends.index("r0") < ends.index("r1") < ends.index("late")


@pytest.mark.parametrize(("num_slots", "computed", "again"), [(64, 36, 4), (72, 40, 0)])
def test_what_stayed_in_the_cache_is_not_recomputed(
    num_slots: int, computed: int, again: int
) -> None:
    """The old request takes the end of the young one's KV, its answer; or finds room enough."""
    bench = EngineBench(page_size=4, num_slots=num_slots, scheduler=OPTIMIST)
    bench.submit("old", _prompt(1, 20), max_tokens=13)
    young = bench.submit("young", _prompt(2, 32), max_tokens=30)
    _step_until_retraction(bench)
    assert young.retracted_len == computed
    bench.run()
    assert bench.engine.scheduler.counters["retracted_tokens_recomputed"] == again
    assert bench.recorder.told["young"] == answer(_prompt(2, 32), 30)
    bench.assert_idle()


def test_without_pressure_nobody_is_retracted() -> None:
    bench = EngineBench(num_slots=192, rows=32, scheduler=SchedulerConfig(output_reserve=1.0))
    for name, prompt in _prompts(16).items():
        bench.submit(name, prompt, max_tokens=30)
    bench.run(5000)
    assert bench.engine.scheduler.counters["retractions"] == 0
    assert bench.engine.scheduler.counters["steps_sat_out"] == 0


def test_optimism_lets_more_requests_in() -> None:
    running = []
    for reserve in (1.0, 0.25):
        bench = EngineBench(
            page_size=1, num_slots=200, scheduler=SchedulerConfig(output_reserve=reserve)
        )
        for number in range(8):
            bench.submit(f"r{number}", _prompt(number, 10), max_tokens=80)
        bench.engine.step()
        running.append(bench.engine.scheduler.running)
    assert running == [2, 6]


def test_prompts_computed_for_others_are_never_retracted_and_keep_their_promise() -> None:
    bench = EngineBench(
        page_size=1, num_slots=64, scheduler=SchedulerConfig(output_reserve=0.0, chunk_tokens=9)
    )
    old = bench.submit("old", _prompt(1, 4), max_tokens=50)
    young = bench.submit("young", _prompt(2, 4), max_tokens=50)
    bench.engine.step()
    held = bench.submit("held", _prompt(3, 50), prefill_only=True)
    while held.stage is not Stage.HELD:
        assert bench.engine.step()
    # There was room for the old one's first tokens only; it waits for the handoff to end.
    assert (old.retractions, young.retractions) == (0, 1)
    bench.run()
    assert old.stage is Stage.DECODING
    assert not bench.engine.step()
    assert bench.engine.scheduler.counters["steps_sat_out"] > 0
    bench.engine.end(held)
    bench.run()
    assert bench.recorder.told["old"] == answer(_prompt(1, 4), 50)
    assert bench.recorder.told["young"] == answer(_prompt(2, 4), 50)
    bench.assert_idle()


def test_request_that_does_not_fit_is_not_opened_again_before_there_is_room() -> None:
    bench = EngineBench(page_size=1, num_slots=64, scheduler=SchedulerConfig(output_reserve=1.0))
    bench.submit("runs", _prompt(1, 10), max_tokens=30)
    bench.submit("waits", _prompt(2, 30), max_tokens=20)
    bench.engine.step()
    bench.engine.step()
    tried = bench.engine.scheduler.counters["admissions_tried"]
    for _ in range(20):
        bench.engine.step()
    assert bench.engine.scheduler.counters["admissions_tried"] == tried
    bench.run()
    assert bench.recorder.told["waits"] == answer(_prompt(2, 30), 20)


def test_retracted_request_goes_before_kv_of_other_workers() -> None:
    bench = EngineBench(page_size=1, num_slots=64, scheduler=OPTIMIST)
    for n in range(2):
        bench.submit(f"r{n}", _prompt(n, 16), max_tokens=40)
    bench.engine.step()
    inbound = bench.request("inbound", _prompt(5, 8))
    bench.engine.submit_inbound(inbound)
    assert bench.engine.next_expected() is inbound
    _step_until_retraction(bench)
    assert not bench.engine.reserve_inbound(inbound)
    later = bench.request("later", _prompt(6, 8))
    bench.engine.submit_inbound(later)
    assert bench.engine.next_expected() is None
    bench.run()
    assert bench.engine.reserve_inbound(inbound)
    assert bench.engine.next_expected() is later


@pytest.mark.parametrize("stage", ["running", "retracted"])
def test_ending_everyone_under_pressure_gives_everything_back(stage: str) -> None:
    bench = EngineBench(page_size=4, num_slots=64, scheduler=OPTIMIST)
    requests = [bench.submit(f"r{n}", _prompt(n, 16), max_tokens=40) for n in range(3)]
    _step_until_retraction(bench)
    order = requests if stage == "running" else requests[::-1]
    for request in order:
        bench.engine.end(request)
    bench.assert_idle()
    assert not bench.engine.step()
    assert bench.engine.scheduler.waiting == 0
