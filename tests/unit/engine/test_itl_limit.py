"""Chunks beside running answers, in an engine whose clock the model moves."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from engine.itl_limit import PROMPT_TOKENS_MIN
from engine.request import Stage
from kvferry.config import SchedulerConfig
from tests.support.digest_model import answer
from tests.support.engine_bench import EngineBench

if TYPE_CHECKING:
    from engine.request import Request

STEP_S, TOKEN_S = 0.02, 0.001
PROMPT = [at * 7 % 200 for at in range(500)]


class PacedBench(EngineBench):
    """Steps take their time on the manual clock."""

    def __init__(self, itl_limit_ms: float, chunk_tokens: int = 128) -> None:
        config = SchedulerConfig(chunk_tokens=chunk_tokens, itl_limit_ms=itl_limit_ms)
        super().__init__(num_slots=2048, rows=16, scheduler=config, auditing=False)
        forward = self.runner.forward

        def paced(batch, on_layers=None):
            self.engine.clock.advance(STEP_S + TOKEN_S * len(batch.token_ids))
            return forward(batch, on_layers)

        self.runner.forward = paced

    def stream(self, name: str, tokens: int) -> Request:
        """An answer that has begun to run."""
        request = self.submit(name, [1, 2, 3, len(name)], max_tokens=tokens)
        while request.stage is not Stage.DECODING:
            assert self.engine.step()
        return request

    def gaps_while(self, request: Request) -> list[float]:
        """Seconds of each step until the prompt of `request` is computed."""
        times = [self.engine.clock.now()]
        while request.stage in (Stage.WAITING, Stage.PREFILLING):
            assert self.engine.step()
            times.append(self.engine.clock.now())
        return [later - earlier for earlier, later in itertools.pairwise(times)]


def test_a_prompt_is_cut_so_that_running_answers_keep_their_limit() -> None:
    bench = PacedBench(itl_limit_ms=70.0)
    bench.stream("a", 300)
    for _ in range(5):
        bench.engine.step()
    gaps = bench.gaps_while(bench.submit("p", PROMPT))
    assert max(gaps) <= 0.0701
    # 49 tokens beside the answer's one; the first steps try 16 and 32.
    assert len(gaps) <= 2 + 500 // 45 + 1


def test_without_a_limit_a_step_takes_the_whole_chunk() -> None:
    bench = PacedBench(itl_limit_ms=0.0)
    bench.stream("a", 100)
    gaps = bench.gaps_while(bench.submit("p", PROMPT))
    assert len(gaps) == 4
    assert max(gaps) == pytest.approx(STEP_S + 128 * TOKEN_S)


def test_where_nothing_decodes_the_limit_does_not_hold() -> None:
    bench = PacedBench(itl_limit_ms=1.0)
    assert len(bench.gaps_while(bench.submit("p", PROMPT))) == 4


def test_a_limit_that_cannot_be_kept_lets_prompts_progress() -> None:
    bench = PacedBench(itl_limit_ms=0.001)
    bench.stream("a", 300)
    gaps = bench.gaps_while(bench.submit("p", PROMPT))
    assert len(gaps) == -(-len(PROMPT) // PROMPT_TOKENS_MIN)


def test_a_chunk_below_the_minimum_holds() -> None:
    bench = PacedBench(itl_limit_ms=0.001, chunk_tokens=8)
    bench.stream("a", 300)
    gaps = bench.gaps_while(bench.submit("p", PROMPT[:70]))
    assert len(gaps) == 70 // 7


def test_the_limit_changes_no_token() -> None:
    bench = PacedBench(itl_limit_ms=40.0)
    for number in range(3):
        bench.submit(f"s{number}", [number + 1] * 9, max_tokens=60)
    for _ in range(4):
        bench.engine.step()
    for number in range(3):
        bench.submit(f"p{number}", PROMPT[number : number + 300], max_tokens=20)
    bench.run()
    told = bench.recorder.told
    assert all(told[f"s{n}"] == answer([n + 1] * 9, 60) for n in range(3))
    assert all(told[f"p{n}"] == answer(PROMPT[n : n + 300], 20) for n in range(3))
    bench.assert_idle()
