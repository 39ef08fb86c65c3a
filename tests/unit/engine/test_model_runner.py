"""Our decoder against `transformers`, through shuffled pages, chunks and mixed batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from engine.forward_batch import SequenceStep, build_forward_batch
from engine.model_runner import ModelRunner
from engine.model_spec import load_spec
from kvferry.config import DType, KvDType
from mem_cache.layout import KvLayout
from tests.support.paged_kv import make_rows, poisoned_pool
from tests.support.tiny_llama import TinyLlama, make_tiny_llama

if TYPE_CHECKING:
    from pathlib import Path

    from mem_cache.kv_pool import KvPool

PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 4, 16, 64])
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, tuple[TinyLlama, dict[str, Any] | None]] = {
    "untied": (TinyLlama(vocab_size=512), None),
    "tied": (TinyLlama(vocab_size=512, tied_embeddings=True), None),
    "one KV head": (TinyLlama(vocab_size=512, num_kv_heads=1), None),
    "no GQA": (TinyLlama(vocab_size=512, num_kv_heads=4), None),
    "wide heads": (TinyLlama(vocab_size=512, head_dim=24), None),
    "llama3 rope": (TinyLlama(vocab_size=512), LLAMA3),
    "linear rope": (
        TinyLlama(vocab_size=512),
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    ),
    "dynamic rope": (
        TinyLlama(vocab_size=512, context_length=128),
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    ),
}


def _pool(directory: Path, page_size: int, dtype: DType = DType.FLOAT32) -> KvPool:
    spec = load_spec(directory)
    kv_dtype = KvDType(dtype.value)
    return poisoned_pool(
        KvLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, kv_dtype, page_size)
    )


def _runner(directory: Path, page_size: int, dtype: DType = DType.FLOAT32) -> ModelRunner:
    pool = _pool(directory, page_size, dtype)
    return ModelRunner(directory, pool, threads=1, dtype=dtype)


@pytest.fixture(scope="module")
def reference() -> Any:
    # Takes seconds to load, which the other tests of this file need not wait for.
    import transformers

    def load(directory: Path) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    return load


def _expected(model: Any, tokens: np.ndarray) -> torch.Tensor:
    """Logits [len(tokens), V] after each token."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]
    return logits


def _prompt(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 512, length).astype(np.int32)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str, tmp_path: Path, reference: Any) -> None:
    shape, rope = VARIANTS[variant]
    directory = make_tiny_llama(tmp_path, shape, rope_parameters=rope)
    tokens = _prompt(90, 1)
    batch = build_forward_batch([SequenceStep(1, tokens, 0, True)], make_rows(16, 1), 16)
    logits = _runner(directory, 16).forward(batch)
    assert logits.shape == (1, 512)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(
        logits, _expected(reference(directory), tokens)[-1:], atol=1e-3, rtol=1e-4
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, reference: Any) -> tuple[Path, Any]:
    directory = make_tiny_llama(tmp_path_factory.mktemp("tiny"), TinyLlama(vocab_size=512))
    return directory, reference(directory)


@PAGE_SIZES
def test_chunks_and_decodes_in_one_batch(page_size: int, tiny: tuple[Path, Any]) -> None:
    """Three sequences advance by different steps; every wanted row equals a whole forward."""
    directory, model = tiny
    runner, rows = _runner(directory, page_size), make_rows(page_size, 3)
    prompts = {1: _prompt(70, 1), 2: _prompt(66, 2), 3: _prompt(40, 3)}
    expected = {row: _expected(model, tokens) for row, tokens in prompts.items()}
    # Tokens of each sequence per step; a step skips a sequence that has 0.
    steps = [(1, 63, 17), (64, 1, 1), (3, 1, 20), (1, 1, 1), (1, 0, 1)]
    done = dict.fromkeys(prompts, 0)
    for counts in steps:
        parts = []
        for row, count in zip(prompts, counts, strict=True):
            if count:
                tokens = prompts[row][done[row] : done[row] + count]
                parts.append((row, SequenceStep(row, tokens, done[row], True)))
                done[row] += count
        logits = runner.forward(build_forward_batch([step for _, step in parts], rows, page_size))
        wanted = torch.stack([expected[row][done[row] - 1] for row, _ in parts])
        torch.testing.assert_close(logits, wanted, atol=1e-3, rtol=1e-4)
    assert done == {row: len(tokens) for row, tokens in prompts.items()}


def test_logits_only_where_wanted(tiny: tuple[Path, Any]) -> None:
    directory, _ = tiny
    runner, rows = _runner(directory, 4), make_rows(4, 2)
    steps = [
        SequenceStep(1, _prompt(6, 1), 0, wants_logits=False),
        SequenceStep(2, _prompt(5, 2), 0, wants_logits=True),
    ]
    assert runner.forward(build_forward_batch(steps, rows, 4)).shape == (1, 512)
    assert runner.forward(build_forward_batch(steps[:1], rows, 4)).shape == (0, 512)


def test_bfloat16_is_near(tiny: tuple[Path, Any]) -> None:
    directory, model = tiny
    tokens = _prompt(30, 4)
    runner = _runner(directory, 16, DType.BFLOAT16)
    steps = [SequenceStep(1, tokens, 0, True)]
    logits = runner.forward(build_forward_batch(steps, make_rows(16, 1), 16))
    similarity = torch.cosine_similarity(logits[0], _expected(model, tokens)[-1], dim=0)
    assert similarity > 0.99


def test_warm_up_leaves_every_real_slot_alone(tiny: tuple[Path, Any]) -> None:
    directory, _ = tiny
    pool = _pool(directory, 4)
    ModelRunner(directory, pool, threads=1, dtype=DType.FLOAT32).warm_up()
    assert pool.buffer[:, :, 1:].isnan().all()
