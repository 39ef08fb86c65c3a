"""Adapters on each kind of family: logits as `transformers` computes them with merged weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from engine.forward_batch import SequenceStep, build_forward_batch
from engine.lora_weights import load_adapters
from engine.model_runner import ModelRunner
from engine.model_spec import load_spec
from kvferry.adapter_files import adapter_identities
from kvferry.config import DType, KvDType, Quantization
from kvferry.ids import NO_ADAPTER
from mem_cache.element_codec import torch_dtype
from tests.support.paged_kv import make_rows, poisoned_pool
from tests.support.tiny_adapters import ATTENTION, make_adapter, merge_adapter
from tests.support.tiny_families import VOCAB, make_family

if TYPE_CHECKING:
    from pathlib import Path

PAGE_SIZE = 16
TOKENS = np.random.default_rng(1).integers(3, VOCAB, 60).astype(np.int32)
CUTS = ((0, 40), (40, 57), (57, 60))
"""Of each sequence: chunks that different kernels take."""
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"seed": 1, "rank": 8, "lora_alpha": 4, "use_rslora": True},
    "some": {
        "seed": 2,
        "targets": ("q_proj", "v_proj", "down_proj", "up_proj"),
        "ranks": {"v_proj": 2},
        "alpha_pattern": {"down_proj": 9.0},
    },
}


def _expected(directory: Path) -> torch.Tensor:
    """Logits [len(CUTS), V] of `transformers`, float32."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.from_numpy(TOKENS.astype(np.int64))[None]).logits[0]
    return logits[[end - 1 for _, end in CUTS]]


def _logits(
    directory: Path,
    folders: dict[str, str],
    *,
    ranks: int = 1,
    dtype: DType = DType.FLOAT32,
    quantization: Quantization = Quantization.NONE,
) -> dict[str, torch.Tensor]:
    """Of the same tokens under each adapter and without one ("base"), all in one batch, [3, V]."""
    whole = load_spec(directory)
    layout = whole.of_rank(ranks, "ranks").kv_layout(KvDType.FLOAT32, PAGE_SIZE)
    pools = [poisoned_pool(layout) for _ in range(ranks)]
    loaded = load_adapters(folders, whole, torch_dtype(dtype))
    runner = ModelRunner(
        directory,
        *pools,
        threads=1,
        dtype=dtype,
        adapters=loaded,
        quantization=quantization,
    )
    ids = adapter_identities(folders)
    # The same adapter twice, and not side by side.
    names = [*folders, "base", next(iter(folders))]
    rows, found = make_rows(PAGE_SIZE, len(names)), []
    for begin, end in CUTS:
        steps = [
            SequenceStep(row, TOKENS[begin:end], begin, True, 0, ids.get(name, NO_ADAPTER))
            for row, name in enumerate(names, 1)
        ]
        found.append(runner.forward(build_forward_batch(steps, rows, PAGE_SIZE)))
    runner.close()
    logits = torch.stack(found, dim=1)
    torch.testing.assert_close(logits[0], logits[-1], atol=1e-3, rtol=1e-4)
    return dict(zip(names[:-1], logits[:-1], strict=True))


@pytest.mark.parametrize("family", ["llama with biases", "qwen2", "gemma2", "gemma3", "qwen3 moe"])
def test_logits_are_those_of_merged_weights(family: str, tmp_path: Path) -> None:
    """On one rank and on two; where scores have a factor of their own; beside experts."""
    directory = make_family(tmp_path / "model", family)
    of_mixture = {"targets": ATTENTION} if "moe" in family else {}
    folders = {
        name: str(make_adapter(tmp_path / name, directory, **settings | of_mixture))
        for name, settings in ADAPTERS.items()
    }
    expected = {"base": _expected(directory)} | {
        name: _expected(merge_adapter(tmp_path / f"{name} merged", directory, tmp_path / name))
        for name in folders
    }
    assert (expected["all"] - expected["base"]).abs().max() > 1.0, "the adapter does nothing"
    for ranks in (1, 2):
        found = _logits(directory, folders, ranks=ranks)
        for name, logits in expected.items():
            torch.testing.assert_close(found[name], logits, atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
def test_half_precision_rounds_and_no_more(dtype: DType, tmp_path: Path) -> None:
    directory = make_family(tmp_path / "model", "qwen2")
    adapter = make_adapter(tmp_path / "a", directory, seed=3, dtype=torch.bfloat16)
    expected = _expected(merge_adapter(tmp_path / "merged", directory, adapter))
    found = _logits(directory, {"a": str(adapter)}, dtype=dtype)
    assert torch.cosine_similarity(found["a"][0], expected[0], dim=0) > 0.9
    assert torch.cosine_similarity(found["base"][0], expected[0], dim=0) < 0.9


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_over_int8_weights_an_adapter_is_whole(family: str, tmp_path: Path) -> None:
    """It is added to what the eight bits give, in float32."""
    directory = make_family(tmp_path / "model", family)
    adapter = make_adapter(tmp_path / "a", directory, seed=3)
    expected = _expected(merge_adapter(tmp_path / "merged", directory, adapter))
    found = _logits(directory, {"a": str(adapter)}, quantization=Quantization.INT8)
    near, far = (torch.cosine_similarity(found[name], expected, dim=1) for name in ("a", "base"))
    assert near.min() > 0.99
    assert far.max() < 0.9
