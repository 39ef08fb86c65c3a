"""Each family against `transformers`: logits, ranks, shards, element types, and what is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.torch
import torch

from engine.forward_batch import SequenceStep, build_forward_batch
from engine.model_runner import ModelRunner
from engine.model_spec import load_spec
from kvferry.config import DType, KvDType
from kvferry.errors import ConfigError
from tests.support.paged_kv import make_rows, poisoned_pool
from tests.support.tiny_families import FAMILIES, VOCAB, make_family

if TYPE_CHECKING:
    from pathlib import Path

PAGE_SIZE = 16
TOKENS = np.random.default_rng(1).integers(3, VOCAB, 90).astype(np.int32)
ENDS = (40, 70, 71, 73, 90)
"""Of steps: chunks and decoded tokens, which different kernels take."""


def _expected(directory: Path) -> torch.Tensor:
    """Logits [len(ENDS), V] of `transformers`, float32."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.from_numpy(TOKENS.astype(np.int64))[None]).logits[0]
    return logits[[end - 1 for end in ENDS]]


def _logits(directory: Path, ranks: int = 1, dtype: DType = DType.FLOAT32) -> torch.Tensor:
    layout = load_spec(directory).of_rank(ranks, "ranks").kv_layout(KvDType.FLOAT32, PAGE_SIZE)
    pools = [poisoned_pool(layout) for _ in range(ranks)]
    runner, rows = ModelRunner(directory, *pools, threads=1, dtype=dtype), make_rows(PAGE_SIZE, 1)
    found, begin = [], 0
    for end in ENDS:
        step = SequenceStep(1, TOKENS[begin:end], begin, wants_logits=True)
        found.append(runner.forward(build_forward_batch([step], rows, PAGE_SIZE)))
        begin = end
    runner.close()
    return torch.cat(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    """On one rank, and on two: biases are added once, head norms are every rank's."""
    directory = make_family(tmp_path, family)
    expected = _expected(directory)
    for ranks in (1, 2):
        torch.testing.assert_close(_logits(directory, ranks), expected, atol=1e-3, rtol=1e-4)


def test_weights_in_several_files(tmp_path: Path) -> None:
    directory = make_family(tmp_path, "qwen2 moe", shard_bytes=200_000)
    assert len(list(directory.glob("*.safetensors"))) > 2
    # Some repositories hold the same weights once more in another form.
    safetensors.torch.save_file({"other": torch.zeros(1)}, directory / "consolidated.safetensors")
    torch.testing.assert_close(_logits(directory), _expected(directory), atol=1e-3, rtol=1e-4)
    next(directory.glob("*-00002-of-*")).unlink()
    with pytest.raises(ConfigError, match=r"lacks model-00002-of-.*index\.json names"):
        _logits(directory)
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"a": 1}}')
    with pytest.raises(ConfigError, match="no weight_map"):
        _logits(directory)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_weights_compute_in_the_models_type(
    stored: torch.dtype, tmp_path: Path
) -> None:
    directory = make_family(tmp_path, "qwen3 moe", dtype=stored)
    expected = _expected(directory)
    torch.testing.assert_close(_logits(directory), expected, atol=1e-3, rtol=1e-4)
    half = _logits(directory, dtype=DType.BFLOAT16)
    assert torch.cosine_similarity(half[0], expected[0], dim=0) > 0.9


def _change_weights(directory: Path, change: Any) -> None:
    file = directory / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    change(tensors)
    safetensors.torch.save_file(tensors, file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.bias"),
            r"no tensor 'model\.layers\.1\.self_attn\.k_proj\.bias'",
        ),
        (
            lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.bias": torch.zeros(96)}),
            r"a tensor 'model\.layers\.0\.mlp\.up_proj\.bias' that config\.json has no use for",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.zeros(32)}),
            r"'model\.norm\.weight' has shape \(32,\); config\.json says \(64,\)",
        ),
        (
            lambda tensors: tensors.update({"model.embed_tokens.weight": torch.zeros(9, 64)}),
            r"'model\.embed_tokens\.weight' has shape \(9, 64\)",
        ),
    ],
    ids=["missing", "left over", "misshapen", "too few tokens"],
)
def test_weights_of_another_model_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    directory = make_family(tmp_path, "qwen2")
    _change_weights(directory, change)
    with pytest.raises(ConfigError, match=message) as raised:
        _logits(directory)
    assert raised.value.field == "model.path"


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_stored_head_counts(factor: float, tmp_path: Path) -> None:
    """Though the config ties it to the embedding; and what follows from the config may be there."""
    directory = make_family(tmp_path, "qwen2 tied")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * factor
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    _change_weights(directory, change)
    torch.testing.assert_close(_logits(directory), _expected(directory), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("family", ["mixtral", "qwen2 moe"])
def test_ranks_share_the_columns_of_each_expert(family: str, tmp_path: Path) -> None:
    directory = make_family(tmp_path, family)
    config = json.loads((directory / "config.json").read_text())
    key = "intermediate_size" if family == "mixtral" else "shared_expert_intermediate_size"
    (directory / "config.json").write_text(json.dumps(config | {key: 99}))
    with pytest.raises(ConfigError, match="is 2; must divide the model's 99 columns of"):
        load_spec(directory).of_rank(2, "ranks")
