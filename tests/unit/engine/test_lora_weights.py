"""What adapters add to products, how they are cut for ranks, and what of them is refused."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.lora import AdapterRows
from engine.lora_weights import NO_ADAPTERS, load_adapters, module_shapes
from engine.model_spec import load_spec
from engine.operators.torch_operators import TorchOperators
from engine.projection import Projection
from engine.tensor_parallel import WHOLE, Shard
from kvferry.adapter_files import adapter_identities
from kvferry.errors import ConfigError
from kvferry.ids import AdapterId
from tests.support.tiny_adapters import make_adapter, write_adapter_config
from tests.support.tiny_llama import TinyLlama, make_tiny_llama

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SHAPE = TinyLlama(num_layers=2, vocab_size=512)
PREFIX = "base_model.model.model.layers.0"
LAYER = "model.layers.0"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"), SHAPE)


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without K, and with another rank for V."""
    targets = ("q_proj", "v_proj", "o_proj", "down_proj", "up_proj")
    folder = tmp_path_factory.mktemp("adapters") / "made"
    return make_adapter(folder, model, seed=1, targets=targets, ranks={"v_proj": 2}, lora_alpha=6)


def load(model: Path, **folders: Path) -> Any:
    directories = {name: str(folder) for name, folder in folders.items()}
    return load_adapters(directories, load_spec(model), torch.float32)


def dense(adapter: Path, module: str) -> torch.Tensor:
    """Scale times B A, of rank 4 with alpha 6, or of rank 2."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    down, up = (tensors[f"base_model.model.{module}.lora_{part}.weight"] for part in "AB")
    return 6 / len(down) * up @ down


@pytest.mark.parametrize("shard", [WHOLE, Shard(0, 2), Shard(1, 2)])
def test_a_rank_adds_its_part_in_its_place(model: Path, made: Path, shard: Shard) -> None:
    adapters = load(model, a=made)
    (adapter,) = adapters.ids
    names = [f"{LAYER}.self_attn.{part}_proj" for part in "qkv"]
    rows = [64 // shard.ranks, 32 // shard.ranks, 32 // shard.ranks]
    inputs, out = torch.randn(5, 64), torch.zeros(5, sum(rows))
    adapters.inward(names, rows, shard)[adapter].add(inputs, out)
    of_q, of_v = (inputs @ dense(made, names[at]).T for at in (0, 2))
    expected = [of_q[:, shard.of(64)], torch.zeros(5, rows[1]), of_v[:, shard.of(32)]]
    torch.testing.assert_close(out, torch.cat(expected, dim=1), atol=1e-5, rtol=1e-5)


def test_ranks_summands_are_the_whole(model: Path, made: Path) -> None:
    adapters, module = load(model, a=made), f"{LAYER}.mlp.down_proj"
    (adapter,) = adapters.ids
    inputs, out = torch.randn(5, 128), torch.zeros(5, 64)
    for shard in (Shard(0, 2), Shard(1, 2)):
        part = inputs[:, shard.of(128)].contiguous()
        adapters.outward(module, shard)[adapter].add(part, out)
    torch.testing.assert_close(out, inputs @ dense(made, module).T, atol=1e-5, rtol=1e-5)


def test_only_the_tokens_of_an_adapter_change(model: Path, made: Path, tmp_path: Path) -> None:
    other = make_adapter(tmp_path / "other", model, seed=2, targets=("k_proj",))
    adapters, module = load(model, made=made, other=other), f"{LAYER}.self_attn.o_proj"
    identities = adapter_identities({"made": str(made), "other": str(other)})
    weight, inputs = torch.randn(64, 64), torch.randn(6, 64)
    projection = Projection(weight, updates=adapters.outward(module, WHOLE))
    rows = [
        AdapterRows(identities["made"], slice(1, 3)),
        # It has nothing for this module.
        AdapterRows(identities["other"], slice(3, 5)),
    ]
    expected = inputs @ weight.T
    plain = projection.apply(TorchOperators(), inputs)
    torch.testing.assert_close(plain, expected)
    expected[1:3] += inputs[1:3] @ dense(made, module).T
    out = projection.apply(TorchOperators(), inputs, rows)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(out[3:], plain[3:])
    assert torch.equal(out[0], plain[0])


def test_equal_files_are_one_adapter_whatever_its_name(
    model: Path, made: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(made, tmp_path / "copy")
    assert len(load(model, one=made, two=copy).ids) == 1
    write_adapter_config(copy, {"lora_alpha": 7})
    assert len(load(model, one=made, two=copy).ids) == 2
    assert NO_ADAPTERS.ids == frozenset()
    assert AdapterId("") not in load(model, one=made).ids


CONFIG_REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "DoRA": ({"use_dora": True}, "use_dora is True"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
    "biases": ({"bias": "lora_only"}, "bias is 'lora_only'"),
    "a bias of B": ({"lora_bias": True}, "lora_bias is True"),
    "weights turned round": ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
    "a changed base": ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
    "expert tensors": ({"target_parameters": ["mlp.experts"]}, "target_parameters is"),
    "tokens": ({"trainable_token_indices": [3]}, r"trainable_token_indices is \[3\]"),
    "from some token on": ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens is"),
    "what nobody knows": ({"swirl": 2}, "swirl is 2, which is not supported"),
    "another method": ({"peft_type": "IA3"}, "peft_type is 'IA3'; must be LORA"),
    "no rank": ({"r": 0}, "r is 0; must be an integer above 0"),
    "a truth for a rank": ({"r": True}, "r is True; must be an integer"),
    "a huge rank": ({"r": 513}, "r is 513; must be at most 512"),
    "a huge rank of some": ({"rank_pattern": {"q_proj": 600}}, "'q_proj'] is 600; must be at most"),
    "no alpha": ({"lora_alpha": None}, "lora_alpha is None; must be a finite number"),
    "an alpha of some": ({"alpha_pattern": {"q": "x"}}, "alpha_pattern.'q'. is 'x'; must be a"),
    "no pattern": ({"rank_pattern": {"(": 4}}, "is no regular expression"),
    "patterns in a list": ({"rank_pattern": [4]}, r"rank_pattern is \[4\]; must be an object"),
}


@pytest.mark.parametrize("name", CONFIG_REFUSALS)
def test_a_config_that_is_not_computed_is_refused(
    name: str, model: Path, made: Path, tmp_path: Path
) -> None:
    change, message = CONFIG_REFUSALS[name]
    folder = shutil.copytree(made, tmp_path / "changed")
    write_adapter_config(folder, change)
    with pytest.raises(ConfigError, match=message) as raised:
        load(model, mine=folder)
    assert raised.value.field == "model.adapters.mine"
    assert "adapter_config.json" in raised.value.problem


def _renamed(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for part in "AB":
            tensors[f"{PREFIX}.{new}.lora_{part}.weight"] = tensors.pop(
                f"{PREFIX}.{old}.lora_{part}.weight"
            )

    return change


Q = f"{PREFIX}.self_attn.q_proj"
TENSOR_REFUSALS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "DoRA": (
        lambda tensors: tensors.update({f"{Q}.lora_magnitude_vector": torch.ones(64)}),
        "lora_magnitude_vector', of torch.float32, is not supported",
    ),
    "embedding": (
        lambda tensors: tensors.update(
            {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 512)}
        ),
        "embed_tokens.lora_embedding_A', of torch.float32, is not supported",
    ),
    "head": (
        lambda tensors: tensors.update(
            {f"base_model.model.lm_head.lora_{part}.weight": torch.ones(4, 4) for part in "AB"}
        ),
        "adapts 'lm_head'; supported are",
    ),
    "experts": (
        _renamed("mlp.up_proj", "mlp.experts.0.up_proj"),
        "adapts 'model.layers.0.mlp.experts.0.up_proj'",
    ),
    "a module that the model lacks": (
        _renamed("self_attn.q_proj", "self_attn.qkv_proj"),
        "adapts 'model.layers.0.self_attn.qkv_proj'; supported are those that the model has",
    ),
    "a half": (
        lambda tensors: tensors.pop(f"{Q}.lora_A.weight"),
        "has lora_B of 'model.layers.0.self_attn.q_proj', but no lora_A",
    ),
    "the other half": (
        lambda tensors: tensors.pop(f"{Q}.lora_B.weight"),
        "has lora_A of 'model.layers.0.self_attn.q_proj', but no lora_B",
    ),
    "another rank": (
        lambda tensors: tensors.update({f"{Q}.lora_A.weight": torch.ones(5, 64)}),
        r"lora_A of .*q_proj' has shape \(5, 64\); it must have \(4, 64\)",
    ),
    "another width": (
        lambda tensors: tensors.update({f"{Q}.lora_B.weight": torch.ones(48, 4)}),
        r"lora_B of .*q_proj' has shape \(48, 4\); it must have \(64, 4\)",
    ),
    "whole numbers": (
        lambda tensors: tensors.update({f"{Q}.lora_B.weight": torch.ones(64, 4).int()}),
        "of torch.int32, is not supported",
    ),
    "nothing": (lambda tensors: tensors.clear(), "has no tensors"),
}


@pytest.mark.parametrize("name", TENSOR_REFUSALS)
def test_tensors_that_are_not_computed_are_refused(
    name: str, model: Path, made: Path, tmp_path: Path
) -> None:
    change, message = TENSOR_REFUSALS[name]
    folder = shutil.copytree(made, tmp_path / "changed")
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=message) as raised:
        load(model, mine=folder)
    assert raised.value.field == "model.adapters.mine"
    assert "adapter_model.safetensors" in raised.value.problem


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("adapter_model.safetensors", b"no tensors", "adapter_model.safetensors: cannot be read"),
        ("adapter_config.json", b"{", "adapter_config.json: is not valid JSON"),
        ("adapter_config.json", b"\xff", "adapter_config.json: is not valid JSON"),
        ("adapter_config.json", b"[]", "adapter_config.json: must contain a JSON object"),
        ("adapter_config.json", None, "cannot read .*adapter_config.json: No such file"),
        ("adapter_model.safetensors", None, "cannot read .*model.safetensors: No such file"),
    ],
)
def test_files_that_cannot_be_read(
    file: str, content: bytes | None, message: str, model: Path, made: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(made, tmp_path / "changed")
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as raised:
        load(model, mine=folder)
    assert raised.value.field == "model.adapters.mine"


def test_modules_of_experts_are_none_that_may_be_adapted(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    mixture = {
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
        "mlp_only_layers": [1],
    }
    (tmp_path / "config.json").write_text(json.dumps(config | mixture))
    shapes = module_shapes(load_spec(tmp_path))
    assert {name for name in shapes if ".mlp." in name} == {
        f"model.layers.1.mlp.{part}_proj" for part in ("gate", "up", "down")
    }
    assert len(shapes) == 2 * 4 + 3
