"""Int8 weights: a model computes what `transformers` does with the elements that are left."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.forward_batch import SequenceStep, build_forward_batch
from engine.model_runner import ModelRunner
from engine.model_spec import load_spec
from engine.weights import load_weights
from kvferry.config import DType, KvDType, Quantization
from tests.support.paged_kv import make_rows, poisoned_pool
from tests.support.rounded_model import write_rounded
from tests.support.tiny_families import FAMILIES, VOCAB, make_family
from tests.support.tiny_llama import TinyLlama, make_tiny_llama

PAGE_SIZE = 4
PROMPT = np.random.default_rng(1).integers(0, VOCAB, 40).astype(np.int32)


def _logits(directory: Path, ranks: int, quantization: Quantization) -> torch.Tensor:
    """[4, V]: after the prompt in two parts, and after two more tokens."""
    layout = load_spec(directory).of_rank(ranks, "ranks").kv_layout(KvDType.FLOAT32, PAGE_SIZE)
    pools = [poisoned_pool(layout) for _ in range(ranks)]
    runner = ModelRunner(
        directory, *pools, threads=1, dtype=DType.FLOAT32, quantization=quantization
    )
    rows, done, found = make_rows(PAGE_SIZE, 1), 0, []
    with closing(runner):
        for count in (25, 13, 1, 1):
            step = SequenceStep(1, PROMPT[done : done + count], done, wants_logits=True)
            found.append(runner.forward(build_forward_batch([step], rows, PAGE_SIZE)))
            done += count
    return torch.cat(found)


def _expected(directory: Path) -> torch.Tensor:
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.from_numpy(PROMPT.astype(np.int64))[None]).logits[0]
    return logits[[24, 37, 38, 39]]


@pytest.mark.parametrize("family", ["llama", "qwen2 moe", "gemma3"])
def test_logits_are_those_of_the_elements(family: str, tmp_path: Path) -> None:
    """Experts, biases, factors of queries and scaled embeddings included."""
    assert family in FAMILIES
    directory = make_family(tmp_path / "model", family)
    logits = _logits(directory, 1, Quantization.INT8)
    expected = _expected(write_rounded(directory, tmp_path / "rounded"))
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-3)
    assert not torch.allclose(logits, _expected(directory), atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("tied", [False, True])
def test_two_ranks_compute_the_same(tmp_path: Path, *, tied: bool) -> None:
    """Each part of a row that a rank has is whole groups."""
    shape = TinyLlama(vocab_size=VOCAB, tied_embeddings=tied)
    directory = make_tiny_llama(tmp_path / "model", shape)
    expected = _expected(write_rounded(directory, tmp_path / "rounded"))
    for ranks in (1, 2):
        logits = _logits(directory, ranks, Quantization.INT8)
        torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-3)


@pytest.fixture
def mapped(tmp_path: Path) -> Path:
    directory = make_tiny_llama(tmp_path / "model", TinyLlama(vocab_size=VOCAB))
    return directory / "model.safetensors"


@pytest.mark.parametrize(
    ("quantization", "stays"), [(Quantization.NONE, True), (Quantization.INT8, False)]
)
def test_the_file_is_mapped_only_as_long_as_it_is_read(
    mapped: Path, quantization: Quantization, *, stays: bool
) -> None:
    weights = load_weights(mapped.parent, DType.FLOAT32, quantization=quantization)
    names = ["model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"]
    kept = [weights.held(weights.fused(names)), weights.tensor("model.norm.weight")]
    assert _is_mapped(mapped)
    weights.release()
    assert _is_mapped(mapped) == stays
    assert len(kept) == 2


def _is_mapped(file: Path) -> bool:
    return str(file) in Path("/proc/self/maps").read_text(encoding="utf-8")
