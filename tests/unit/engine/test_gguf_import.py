"""Converting the bundled model: two processes at once, from an empty directory."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from engine.gguf_import import weights_in_order
from engine.model_spec import load_spec
from engine.weights import load_weights
from kvferry.config import BUNDLED_MODEL, DType

if TYPE_CHECKING:
    from pathlib import Path

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
