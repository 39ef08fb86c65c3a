"""A model with a sliding window against `transformers`, alone and in an engine with little KV."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from engine.engine import Engine
from engine.forward_batch import SequenceStep, build_forward_batch
from engine.model_runner import ModelRunner
from engine.model_spec import load_spec
from engine.request import Request
from kvferry.cache_key import CacheUse
from kvferry.clock import ManualClock
from kvferry.config import CacheConfig, DType, KvDType, SchedulerConfig
from kvferry.errors import ConfigError
from kvferry.ids import Attempt, AttemptId, ExtraKey, RequestId
from kvferry.sampling import SamplingParams
from mem_cache.factory import assemble_kv_cache
from mem_cache.layout import KvLayout
from tests.support.engine_bench import Recorder
from tests.support.paged_kv import make_rows, poisoned_pool
from tests.support.tiny_llama import TinyLlama, make_tiny_llama

if TYPE_CHECKING:
    from pathlib import Path

WINDOW = 24


def _make(directory: Path, **changes: Any) -> Path:
    """A tiny Mistral: a Llama's tensors, and a window."""
    make_tiny_llama(directory, TinyLlama(vocab_size=512))
    config = json.loads((directory / "config.json").read_text())
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    config |= mistral | {"sliding_window": WINDOW} | changes
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _make(tmp_path_factory.mktemp("mistral"))


@pytest.fixture(scope="module")
def reference(mistral: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(mistral, dtype=torch.float32)


def _layout(directory: Path, page_size: int) -> KvLayout:
    spec = load_spec(directory)
    kinds = (spec.num_layers, spec.num_kv_heads, spec.head_dim)
    return KvLayout(*kinds, KvDType.FLOAT32, page_size)


def _prompt(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 512, length).astype(np.int32)


def _logits(model: Any, tokens: np.ndarray) -> torch.Tensor:
    """[len(tokens), V] after each token."""
    with torch.inference_mode():
        return model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]


def test_logits_equal_transformers(mistral: Path, reference: Any) -> None:
    runner = ModelRunner(
        mistral, poisoned_pool(_layout(mistral, 16)), threads=1, dtype=DType.FLOAT32
    )
    tokens, rows = _prompt(90, 1), make_rows(16, 1)
    expected = _logits(reference, tokens)
    begin = 0
    for end in (40, 70, 71, 73, 90):
        step = SequenceStep(1, tokens[begin:end], begin, True)
        logits = runner.forward(build_forward_batch([step], rows, 16))
        torch.testing.assert_close(logits, expected[end - 1 : end], atol=1e-3, rtol=1e-4)
        begin = end


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_an_engine_answers_as_transformers_does(
    page_size: int, mistral: Path, reference: Any
) -> None:
    config = CacheConfig(page_size=page_size, rows=4, audit=True)
    kv_cache = assemble_kv_cache(
        _layout(mistral, page_size), config, 192, context_length=192, window=WINDOW
    )
    runner = ModelRunner(mistral, kv_cache.pool, threads=1, dtype=DType.FLOAT32)
    scheduler = SchedulerConfig(chunk_tokens=20, output_reserve=0.0)
    engine, recorder = Engine(kv_cache, runner, scheduler, ManualClock()), Recorder()
    shared = _prompt(60, 3)
    prompts = {f"r{n}": np.concatenate([shared, _prompt(5 + n, 4 + n)]) for n in range(3)}
    for name, prompt in prompts.items():
        engine.submit(_request(name, prompt, recorder))
    for _ in range(400):
        if not engine.step():
            break
    for name, prompt in prompts.items():
        answer = recorder.told[name]
        tokens = np.concatenate([prompt, answer]).astype(np.int32)
        best = _logits(reference, tokens[:-1]).argmax(dim=-1)[len(prompt) - 1 :]
        assert answer == best.tolist()
    kv_cache.audit()
    assert kv_cache.accounts().is_idle


def _request(name: str, prompt: np.ndarray, recorder: Recorder) -> Request:
    return Request(
        id=AttemptId(RequestId(name), Attempt(1)),
        prompt=prompt,
        sampling=SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True),
        cache_use=CacheUse(ExtraKey("")),
        eos_token_ids=(2,),
        listener=recorder,
        prefill_only=False,
    )


def test_only_a_mistral_has_a_window(tmp_path: Path) -> None:
    assert load_spec(_make(tmp_path / "a")).sliding_window == WINDOW
    assert load_spec(_make(tmp_path / "b", sliding_window=None)).sliding_window is None
    llama = _make(tmp_path / "c", architectures=["LlamaForCausalLM"])
    assert load_spec(llama).sliding_window is None
    mixed = ["sliding_attention", "full_attention"]
    with pytest.raises(ConfigError, match="full_attention"):
        load_spec(_make(tmp_path / "e", layer_types=mixed))
    with pytest.raises(ConfigError, match="sliding_window is 1"):
        load_spec(_make(tmp_path / "d", sliding_window=1))
