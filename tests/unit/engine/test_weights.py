"""Weight files: the safetensors format, and fusing without copies."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import safetensors.torch
import torch

from engine.weights import load_weights, write_weights
from kvferry.config import DType
from kvferry.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def _tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(rows, 8) for name, rows in (("q", 4), ("k", 2), ("v", 2), ("o", 8))}


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    tensors = _tensors() | {"norm": torch.randn(8)}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    weights = load_weights(tmp_path, DType.FLOAT32)
    for name, tensor in tensors.items():
        assert torch.equal(weights.tensor(name), tensor)
    stacked = torch.cat([tensors[name] for name in ("q", "k", "v")])
    assert torch.equal(weights.fused(["q", "k", "v"]), stacked)


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    tensors = _tensors()
    write_weights(tmp_path / "model.safetensors", tensors.items())
    found = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_neighbours_are_fused_without_a_copy(tmp_path: Path) -> None:
    tensors = _tensors()
    write_weights(tmp_path / "model.safetensors", tensors.items())
    weights = load_weights(tmp_path, DType.FLOAT32)
    fused = weights.fused(["q", "k", "v"])
    assert torch.equal(fused, torch.cat([tensors[name] for name in ("q", "k", "v")]))
    assert fused.data_ptr() == weights.tensor("q").data_ptr()
    assert fused.data_ptr() % 64 == 0


def test_strangers_are_fused_with_a_copy(tmp_path: Path) -> None:
    tensors = _tensors()
    for name, tensor in tensors.items():
        write_weights(tmp_path / f"model-{name}.safetensors", [(name, tensor)])
    weights = load_weights(tmp_path, DType.FLOAT32)
    fused = weights.fused(["v", "q"])
    assert torch.equal(fused, torch.cat([tensors["v"], tensors["q"]]))


def test_other_dtypes_are_converted(tmp_path: Path) -> None:
    tensors = _tensors()
    write_weights(tmp_path / "model.safetensors", tensors.items())
    weights = load_weights(tmp_path, DType.BFLOAT16)
    assert torch.equal(weights.tensor("o"), tensors["o"].bfloat16())
    assert weights.fused(["q", "k"]).dtype == torch.bfloat16


@pytest.mark.parametrize("keep", [3, 20, 300])
def test_a_damaged_file_is_refused(tmp_path: Path, keep: int) -> None:
    file = tmp_path / "model.safetensors"
    write_weights(file, _tensors().items())
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=r"safetensors|damaged"):
        load_weights(tmp_path, DType.FLOAT32)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \.safetensors file"):
        load_weights(tmp_path, DType.FLOAT32)
    write_weights(tmp_path / "model.safetensors", _tensors().items())
    with pytest.raises(ConfigError, match="no tensor 'w'"):
        load_weights(tmp_path, DType.FLOAT32).tensor("w")


_ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "header",
    [
        "[" * 100_000,
        "[]",
        "{",
        json.dumps({"w": []}),
        json.dumps({"w": {"dtype": "F32"}}),
        json.dumps({"w": _ENTRY | {"dtype": []}}),
        json.dumps({"w": _ENTRY | {"shape": ["2"]}}),
        json.dumps({"w": _ENTRY | {"shape": [-2, -1]}}),
        json.dumps({"w": _ENTRY | {"data_offsets": [0, 8, 16]}}),
        json.dumps({"w": _ENTRY | {"data_offsets": [-8, 0]}}),
        json.dumps({"w": _ENTRY | {"data_offsets": [0, 1e999]}}),
    ],
)
def test_a_damaged_header_is_refused_by_name(tmp_path: Path, header: str) -> None:
    file = tmp_path / "model.safetensors"
    text = header.encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(ConfigError, match=r"model\.path: .*model\.safetensors"):
        load_weights(tmp_path, DType.FLOAT32)
