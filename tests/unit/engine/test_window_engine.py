"""The engine step under a sliding window, with a model that notices any wrong slot."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.config import SchedulerConfig
from kvferry.generation import FinishReason
from tests.support.digest_model import VOCAB, next_token
from tests.support.engine_bench import EngineBench

PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 4, 16, 64])
WINDOW = 37


def _prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(10, VOCAB, length).tolist()


def _answer(prompt: list[int], max_tokens: int) -> list[int]:
    """Of an undisturbed run that sees the last tokens only."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens[-WINDOW:]))
    return tokens[len(prompt) :]


@PAGE_SIZES
@pytest.mark.parametrize("radix", [True, False])
@pytest.mark.parametrize("reserve", [1.0, 0.1])
def test_answers_equal_an_undisturbed_run(page_size: int, radix: bool, reserve: float) -> None:
    bench = EngineBench(
        page_size=page_size,
        num_slots=384,
        rows=12,
        radix=radix,
        scheduler=SchedulerConfig(chunk_tokens=23, output_reserve=reserve),
        window=WINDOW,
    )
    shared = _prompt(0, 70)
    prompts = {f"r{n}": shared + _prompt(n, n * 7 % 30 + 1) for n in range(6)}
    for name, prompt in prompts.items():
        bench.submit(name, prompt, max_tokens=60)
    bench.run(steps_max=3000)
    assert bench.recorder.told == {name: _answer(p, 60) for name, p in prompts.items()}
    assert set(bench.recorder.ends.values()) == {FinishReason.LENGTH}
    bench.assert_idle()


@PAGE_SIZES
def test_second_turn_hits_the_first_by_its_end_alone(page_size: int) -> None:
    bench = EngineBench(page_size=page_size, num_slots=512, window=WINDOW)
    first = _prompt(1, 170)
    bench.submit("first", first)
    bench.run()
    kv_cache = bench.kv_cache
    window = kv_cache.window
    known = (len(first) + 8 - 1) // page_size * page_size
    kept = known - window.needed_from(known) + window.stride + page_size
    # The least recent go first: what is left of the last window.
    evictable = kv_cache.accounts().evictable
    kv_cache.allocator.free(kv_cache.tree.evict(max(0, evictable - kept)))
    assert kv_cache.accounts().evictable < len(first)
    turn = first + bench.recorder.told["first"] + _prompt(2, 9)
    bench.submit("second", turn)
    bench.run()
    assert bench.recorder.hits["second"] == known
    assert bench.recorder.told["second"] == _answer(turn, 8)
    bench.assert_idle()


@PAGE_SIZES
def test_eight_long_answers_share_a_pool_that_holds_two(page_size: int) -> None:
    bench = EngineBench(
        page_size=page_size,
        num_slots=1024,
        scheduler=SchedulerConfig(chunk_tokens=64, output_reserve=0.0),
        window=WINDOW,
        auditing=False,
    )
    prompts = {f"r{n}": _prompt(n, 20) for n in range(8)}
    for name, prompt in prompts.items():
        bench.submit(name, prompt, max_tokens=400)
    bench.run()
    assert bench.recorder.told == {name: _answer(p, 400) for name, p in prompts.items()}
    # All of them side by side: without a window eight of 420 tokens do not fit into 1,024 slots.
    assert max(len(step) for step in bench.runner.steps) == 8
    assert len(bench.runner.steps) < 430
    bench.assert_idle()
