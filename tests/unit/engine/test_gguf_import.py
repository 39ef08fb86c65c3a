"""Converting GGUF files, and the bundled model: two processes at once, from an empty directory."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import TYPE_CHECKING

import gguf
import pytest
import safetensors.torch
import torch

from engine.gguf_import import weights_in_order
from engine.model_directory import resolve_model
from engine.model_spec import load_spec
from engine.weights import load_weights
from kvferry.config import BUNDLED_MODEL, DType
from kvferry.errors import ConfigError
from tests.support.small_tokenizer import write_tokenizer
from tests.support.tiny_families import make_family

if TYPE_CHECKING:
    from pathlib import Path

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
_CONVERT = """
import sys
from pathlib import Path
from engine.model_directory import resolve_model
print(resolve_model(sys.argv[1], Path(sys.argv[2])))
"""


@pytest.mark.slow
def test_two_processes_convert_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _CONVERT, BUNDLED_MODEL, str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = {process.communicate(timeout=600)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0]
    visible = [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
    assert answers == {str(path) for path in visible}
    (directory,) = visible
    spec = load_spec(directory)
    assert (spec.num_layers, spec.num_kv_heads, spec.eos_token_ids) == (30, 3, (2,))
    assert "quantization_config" not in json.loads((directory / "config.json").read_text())
    assert (directory / "tokenizer.json").is_file()
    assert "<|im_start|>" in (directory / "chat_template.jinja").read_text()
    weights = load_weights(directory, DType.FLOAT32)
    names = [f"model.layers.29.self_attn.{part}_proj.weight" for part in "qkv"]
    assert weights.fused(names).data_ptr() == weights.tensor(names[0]).data_ptr()


def _write_gguf(file: Path, model: Path, family: str, without: str | None = None) -> None:
    """As llama.cpp's converter does it, with the tokenizer of `small_tokenizer`."""
    config = json.loads((model / "config.json").read_text())
    writer = gguf.GGUFWriter(file, family)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(16)
    vocab = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    writer.add_name("tiny")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(vocab, key=vocab.__getitem__))
    writer.add_token_types([gguf.TokenType.NORMAL] * len(vocab))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], config["num_hidden_layers"])
    for name, tensor in safetensors.torch.load_file(model / "model.safetensors").items():
        if name == without:
            continue
        module, kind = name.rsplit(".", 1)
        stored = _permuted(name, tensor) if family == "llama" else tensor
        writer.add_tensor(f"{names.get_name(module)}.{kind}", stored.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _permuted(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """llama.cpp rotates neighbouring rows of Llama's q and k, not rows half a head apart."""
    heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape).contiguous()


@pytest.mark.parametrize(
    "family", ["qwen2", *(pytest.param(f, marks=pytest.mark.slow) for f in ("llama", "qwen3"))]
)
def test_a_gguf_file_becomes_the_model_it_was_made_of(family: str, tmp_path: Path) -> None:
    # A GGUF file has the epsilon as float32.
    changes = {"rms_norm_eps": 2.0**-20} | ({"head_dim": 128} if family == "qwen3" else {})
    model = make_family(tmp_path / "model", family, **changes)
    write_tokenizer(model)
    _write_gguf(tmp_path / "tiny.gguf", model, family)
    made = resolve_model(str(tmp_path / "tiny.gguf"), tmp_path / "cache")
    assert resolve_model(str(tmp_path / "tiny.gguf"), tmp_path / "cache") == made
    assert load_spec(made) == dataclasses.replace(load_spec(model), eos_token_ids=(2,))
    expected = safetensors.torch.load_file(model / "model.safetensors")
    found = safetensors.torch.load_file(made / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    weights = load_weights(made, DType.FLOAT32)
    names = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"]
    assert weights.fused(names).data_ptr() == weights.tensor(names[0]).data_ptr()


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    """`transformers` makes up random numbers for it."""
    model = make_family(tmp_path / "model", "qwen2")
    write_tokenizer(model)
    missing = "model.layers.1.mlp.up_proj.weight"
    _write_gguf(tmp_path / "tiny.gguf", model, "qwen2", without=missing)
    with pytest.raises(ConfigError, match=f"no tensor for '{missing}'"):
        resolve_model(str(tmp_path / "tiny.gguf"), tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("tiny*")), "published"


@pytest.mark.parametrize(
    ("family", "metadata", "message"),
    [
        ("gemma3", {}, "holds gemma3; from GGUF: llama, qwen2, qwen3"),
        ("llama", {"expert_count": 8}, "mixture of experts"),
        ("qwen2", {"rope.scaling.type": 1}, "rope scaling 1 is not converted"),
    ],
)
def test_what_would_be_read_wrongly_is_refused(
    family: str, metadata: dict[str, int], message: str, tmp_path: Path
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", family)
    for key, value in metadata.items():
        writer.add_uint32(f"{family}.{key}", value)
    writer.add_tensor("output_norm.weight", torch.zeros(8).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=message):
        resolve_model(str(tmp_path / "tiny.gguf"), tmp_path / "cache")


def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"nothing of the kind")
    with pytest.raises(ConfigError, match="is no GGUF file"):
        resolve_model(str(tmp_path / "tiny.gguf"), tmp_path / "cache")


def test_tensors_without_a_place_are_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot convert the tensor 'model\.extra'"):
        list(weights_in_order({"model.extra": torch.zeros(1)}, 1, tied=True))


def test_weights_are_in_the_order_of_their_use() -> None:
    layer = ["self_attn.v_proj", "self_attn.k_proj", "self_attn.q_proj", "self_attn.o_proj"]
    layer += ["mlp.down_proj", "mlp.up_proj", "mlp.gate_proj"]
    layer += ["post_attention_layernorm", "input_layernorm"]
    modules = ["lm_head", "model.norm", *(f"model.layers.0.{part}" for part in layer)]
    modules.append("model.embed_tokens")
    tensors = {f"{module}.weight": torch.zeros(1) for module in modules}
    ordered = [name.removesuffix(".weight") for name, _ in weights_in_order(tensors, 1, tied=False)]
    assert sorted(ordered) == sorted(modules)
    assert ordered[0] == "model.embed_tokens"
    qkv = ordered.index("model.layers.0.self_attn.q_proj")
    assert [name[-6] for name in ordered[qkv : qkv + 3]] == ["q", "k", "v"]
    gate = ordered.index("model.layers.0.mlp.gate_proj")
    assert ordered[gate + 1] == "model.layers.0.mlp.up_proj"
    assert "lm_head" not in [
        name.removesuffix(".weight") for name, _ in weights_in_order(tensors, 1, tied=True)
    ]
