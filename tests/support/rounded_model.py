"""A model whose weights are what int8 keeps of another's: what that must compute in int8."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from safetensors.torch import load_file, save_file

from engine.operators.quantized_weight import quantize

if TYPE_CHECKING:
    from pathlib import Path


def write_rounded(model: Path, directory: Path) -> Path:
    """A copy of a model in one file; vectors and routers of experts stay."""
    shutil.copytree(model, directory)
    tensors = load_file(model / "model.safetensors")
    rounded = {
        name: quantize(tensor).elements() if tensor.ndim == 2 else tensor
        for name, tensor in tensors.items()
        if not name.endswith((".mlp.gate.weight", "shared_expert_gate.weight"))
    }
    save_file({**tensors, **rounded}, directory / "model.safetensors", {"format": "pt"})
    return directory
