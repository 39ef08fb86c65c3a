"""Tiny random LoRA adapters in peft's format, and the models that they make when merged.

Written and merged here without the code under test: names, shapes and the scale are those of peft.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from pathlib import Path

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
_MODULE = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight")
_SPREAD = 0.5
"""Of what an adapter adds, beside what the module gives: enough for other answers."""


def make_adapter(
    directory: Path,
    model: Path,
    *,
    seed: int,
    rank: int = 4,
    targets: tuple[str, ...] = ATTENTION + MLP,
    ranks: dict[str, int] | None = None,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Path:
    """An adapter of the model in `model`. `ranks`: of modules by their last name, of others `rank`.

    `settings` go to its `adapter_config.json`.
    """
    draw = torch.Generator().manual_seed(seed)
    own = {} if ranks is None else ranks
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in sorted(load_file(model / "model.safetensors").items()):
        module = name.removesuffix(".weight")
        kind = module.rsplit(".", 1)[-1]
        if _MODULE.fullmatch(name) is None or kind not in targets:
            continue
        of_module, (rows, columns) = own.get(kind, rank), weight.shape
        down = torch.randn(of_module, columns, generator=draw) / columns**0.5
        up = torch.randn(rows, of_module, generator=draw) * _SPREAD * float(weight.float().std())
        up *= columns**0.5 / of_module**0.5
        tensors[f"base_model.model.{module}.lora_A.weight"] = down.to(dtype)
        tensors[f"base_model.model.{module}.lora_B.weight"] = up.to(dtype)
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": rank,
        "lora_dropout": 0.05,
        "modules_to_save": None,
        "r": rank,
        "rank_pattern": own,
        "alpha_pattern": {},
        "target_modules": sorted(targets),
        "use_dora": False,
        "use_rslora": False,
    }
    write_adapter_config(directory, config | settings)
    return directory


def write_adapter_config(directory: Path, values: dict[str, Any]) -> None:
    """Replace the fields that `values` names, or write a new file."""
    file = directory / "adapter_config.json"
    old = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(old | values))


def merge_adapter(directory: Path, model: Path, adapter: Path) -> Path:
    """A copy of the model whose weights are W + scale B A."""
    shutil.copytree(model, directory)
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    weights = load_file(directory / "model.safetensors")
    for name, down in tensors.items():
        if ".lora_A." not in name:
            continue
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        rank, kind = down.shape[0], module.rsplit(".", 1)[-1]
        alpha = config["alpha_pattern"].get(kind, config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config["use_rslora"] else rank)
        up = tensors[name.replace("lora_A", "lora_B")]
        weight = weights[f"{module}.weight"]
        weights[f"{module}.weight"] = (weight.double() + scale * up.double() @ down.double()).to(
            weight.dtype
        )
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
