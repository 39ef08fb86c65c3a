"""A real model goes on with an answer at any token as if it had given all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from engine.engine import Engine
from engine.model_runner import ModelRunner
from engine.model_spec import load_spec
from engine.request import Request
from kvferry.cache_key import CacheUse, Sharing
from kvferry.clock import ManualClock
from kvferry.config import CacheConfig, DType, KvDType, SchedulerConfig
from kvferry.ids import Attempt, AttemptId, ExtraKey, RequestId
from kvferry.sampling import SamplingParams
from mem_cache.factory import assemble_kv_cache
from tests.support.tiny_llama import TinyLlama, make_tiny_llama

if TYPE_CHECKING:
    from kvferry.generation import FinishReason, OutputToken

VOCAB, SLOTS, LENGTH = 512, 256, 16
PROMPT = np.random.default_rng(5).integers(3, VOCAB, 30).astype(np.int32)
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 4.0, "seed": 3, "logprobs": 2},
    "penalties": {
        "temperature": 4.0,
        "seed": 4,
        "top_p": 0.95,
        "presence_penalty": 1.5,
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.3,
        "min_tokens": 12,
        "stop_token_ids": tuple(range(0, 120, 2)),
    },
}


class _Listener:
    """Remembers the tokens of one request."""

    def __init__(self) -> None:
        self.said: list[OutputToken] = []
        self.reason: FinishReason | None = None

    def admitted(self, request: Request) -> None: ...

    def computing(self, request: Request, tokens: int, layers: int) -> None: ...

    def computed(self, request: Request) -> None: ...

    def tokens(self, request: Request, tokens: tuple[OutputToken, ...]) -> None:
        self.said += tokens

    def finished(self, request: Request, reason: FinishReason) -> None:
        self.reason = reason


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    directory = make_tiny_llama(tmp_path_factory.mktemp("tiny"), TinyLlama(vocab_size=VOCAB))
    layout = load_spec(directory).kv_layout(KvDType.FLOAT32, 4)
    kv_cache = assemble_kv_cache(layout, CacheConfig(page_size=4, rows=4, audit=True), SLOTS, SLOTS)
    runner = ModelRunner(directory, kv_cache.pool, threads=1, dtype=DType.FLOAT32)
    return Engine(kv_cache, runner, SchedulerConfig(chunk_tokens=16), ManualClock())


def _say(engine: Engine, told: list[int], sharing: Sharing, **options: Any) -> _Listener:
    listener = _Listener()
    request = Request(
        id=AttemptId(RequestId("r"), Attempt(1)),
        prompt=PROMPT,
        sampling=SamplingParams(max_tokens=LENGTH, ignore_eos=True, **options),
        cache_use=CacheUse(ExtraKey(""), sharing),
        eos_token_ids=engine.eos_token_ids,
        listener=listener,
    )
    request.resume(0, told)
    engine.submit(request)
    while engine.step():
        pass
    return listener


@pytest.mark.parametrize("sharing", [Sharing.SHARED, Sharing.PRIVATE])
@pytest.mark.parametrize("kind", KINDS)
def test_the_rest_is_that_of_an_undisturbed_answer(
    engine: Engine, kind: str, sharing: Sharing
) -> None:
    whole = _say(engine, [], Sharing.PRIVATE, **KINDS[kind])
    ids = [token.token_id for token in whole.said]
    assert len(set(ids)) > len(ids) // 2, "an answer that repeats itself shows little"
    for cut in range(1, len(ids)):
        rest = _say(engine, ids[:cut], sharing, **KINDS[kind])
        assert [token.token_id for token in rest.said] == ids[cut:], cut
        assert rest.reason is whole.reason
        for mine, other in zip(rest.said, whole.said[cut:], strict=True):
            if other.logprobs is not None:
                assert mine.logprobs is not None
                # KV computed in chunks and token by token differs by rounding.
                assert mine.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-3)
                assert [i for i, _ in mine.logprobs.top] == [i for i, _ in other.logprobs.top]
    engine.kv_cache.audit()
