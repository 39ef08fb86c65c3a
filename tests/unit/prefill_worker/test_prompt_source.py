"""Prompts computed for others: offered, followed chunk by chunk, and given up exactly once."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kv_transfer.protocol.key import HandoffKey
from kvferry.cache_key import CacheUse
from kvferry.config import SchedulerConfig
from kvferry.errors import AdapterNotLoaded, InvalidInput, Overloaded
from kvferry.ids import NO_ADAPTER, AdapterId, Attempt, ExtraKey, Incarnation, RequestId
from kvferry.sampling import Constraint, ConstraintKind, SamplingParams
from prefill_worker.prompt_source import PromptSource
from tests.support.digest_model import answer
from tests.support.engine_bench import EngineBench

if TYPE_CHECKING:
    from kvferry.generation import OutputToken
    from kvferry.grammar import Grammar
    from mem_cache.request_kv import RequestKV

PROMPT = list(range(20, 40))
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def _key(name: str) -> HandoffKey:
    return HandoffKey(RequestId(name), Attempt(1), Incarnation(11), Incarnation(22))


@dataclass(eq=False)
class FakeDriver:
    """Remembers what it is told, and pins as the real one does."""

    bench: EngineBench
    told: list[tuple[str, object]] = field(default_factory=list)
    pinned: dict[HandoffKey, RequestKV] = field(default_factory=dict)

    def scheduled(self, key: HandoffKey, kv: RequestKV, hit_tokens: int) -> None:
        self.bench.kv_cache.pin(kv)
        self.pinned[key] = kv
        self.told.append(("scheduled", hit_tokens))

    def computed(self, key: HandoffKey, tokens: int) -> None:
        self.told.append(("computed", tokens))

    def computing(self, key: HandoffKey, tokens: int, layers: int) -> None:
        """Layers of a chunk; the digest model has only one."""

    def finished(self, key: HandoffKey, first_tokens: tuple[OutputToken, ...]) -> None:
        self.told.append(("finished", [token.token_id for token in first_tokens]))

    def abort_source(self, key: HandoffKey, reason: str) -> None:
        self.unpin(key)
        self.told.append(("aborted", reason))

    def unpin(self, key: HandoffKey) -> None:
        """What precedes `cancel` and `closed`."""
        if key in self.pinned:
            self.bench.kv_cache.unpin(self.pinned.pop(key))


class RefusingCompiler:
    """Refuses every grammar, once it is asked for."""

    def compile(self, constraint: Constraint) -> Future[Grammar]:
        future: Future[Grammar] = Future()
        future.set_exception(InvalidInput("sampling.regex", "is bad"))
        return future


class Bench:
    def __init__(self, compiler: RefusingCompiler | None = None, **scheduler: int) -> None:
        config = SchedulerConfig(**scheduler)
        self.engine_bench = EngineBench(scheduler=config, compiler=compiler)
        self.driver = FakeDriver(self.engine_bench)
        self.source = PromptSource(self.engine_bench.engine, self.driver)

    def start(
        self,
        name: str,
        prompt: list[int] = PROMPT,
        sampling: SamplingParams = GREEDY,
        *,
        goes_first: bool = False,
        adapter: AdapterId = NO_ADAPTER,
    ) -> HandoffKey:
        key = _key(name)
        tokens = np.asarray(prompt, dtype=np.int32)
        use = CacheUse(ExtraKey(""), adapter=adapter)
        self.source.start(key, tokens, sampling, use, goes_first)
        return key


def test_prompt_is_offered_followed_and_its_first_token_chosen() -> None:
    bench = Bench(chunk_tokens=8)
    key = bench.start("r")
    bench.engine_bench.run()
    assert bench.driver.told == [
        ("scheduled", 0),
        ("computed", 8),
        ("computed", 16),
        ("computed", 20),
        ("finished", answer(PROMPT, 1)),
    ]
    bench.driver.unpin(key)
    bench.source.closed(key)
    bench.engine_bench.assert_idle()


def test_second_prompt_hits_what_the_first_left() -> None:
    bench = Bench()
    for name in ("first", "second"):
        key = bench.start(name)
        bench.engine_bench.run()
        bench.driver.unpin(key)
        bench.source.closed(key)
    hits = [hit for what, hit in bench.driver.told if what == "scheduled"]
    assert hits == [0, 16]
    bench.engine_bench.assert_idle()


@pytest.mark.parametrize("steps", [0, 1, 2, 5], ids=["queued", "first chunk", "later", "computed"])
def test_cancel_in_any_stage_gives_everything_back(steps: int) -> None:
    bench = Bench(chunk_tokens=8)
    key = bench.start("r")
    for _ in range(steps):
        bench.engine_bench.engine.step()
    bench.driver.unpin(key)
    bench.source.cancel(key, "the sink is gone")
    told = len(bench.driver.told)
    bench.engine_bench.run()
    bench.engine_bench.assert_idle()
    assert len(bench.driver.told) == told, "told of a handoff that has ended"


def test_refusals_are_typed_and_leave_nothing() -> None:
    bench = Bench(queue_max=1)
    with pytest.raises(InvalidInput, match="prompt"):
        bench.start("empty", [])
    with pytest.raises(InvalidInput):
        bench.start("huge", list(range(10, 210)) * 2)
    # Refused before anything is made for it: so many tokens would not fit the memory.
    with pytest.raises(InvalidInput, match="max_tokens"):
        bench.start("endless", PROMPT, SamplingParams(max_tokens=2**40))
    with pytest.raises(AdapterNotLoaded, match="5a1e"):
        bench.start("adapted", adapter=AdapterId("5a1e"))
    key = bench.start("queued")
    with pytest.raises(Overloaded):
        bench.start("one too many")
    bench.source.cancel(key, "enough")
    bench.engine_bench.assert_idle()


def test_all_first_tokens_of_a_prompt_are_handed_over_at_once() -> None:
    bench = Bench()
    sampling = SamplingParams(temperature=3.0, seed=2, max_tokens=4, n=5)
    key = bench.start("r", sampling=sampling)
    bench.engine_bench.run()
    ((_, firsts),) = [entry for entry in bench.driver.told if entry[0] == "finished"]
    alone = EngineBench()
    for sample in range(5):
        seed = sampling.of_sample(sample).seed
        alone.submit(f"r{sample}", PROMPT, temperature=3.0, seed=seed, max_tokens=1)
    alone.run()
    assert firsts == [alone.recorder.told[f"r{sample}"][0] for sample in range(5)]
    assert bench.engine_bench.kv_cache.accounts().rows_live == 1
    bench.driver.unpin(key)
    bench.source.closed(key)
    bench.engine_bench.assert_idle()


def test_a_constraint_without_a_first_token_ends_the_handoff() -> None:
    bench = Bench(RefusingCompiler())
    constrained = replace(GREEDY, constraint=Constraint(ConstraintKind.REGEX, "a"))
    bench.start("r", sampling=constrained)
    bench.engine_bench.run()
    assert bench.driver.told == [("scheduled", 0), ("aborted", "sampling.regex: is bad")]
    bench.engine_bench.assert_idle()
