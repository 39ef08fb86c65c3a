from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from kvferry.config import DType, ModelConfig, Quantization
from kvferry.errors import ConfigError
from kvferry.weights_identity import model_identity, weights_identity


def tensors():
    generator = torch.Generator().manual_seed(3)
    return {f"layer.{n}.weight": torch.randn(64, 96, generator=generator) for n in range(3)}


def write(directory, weights, name="model.safetensors", config=None):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config or {"layers": 3}))
    save_file(weights, directory / name)
    return directory


@pytest.fixture
def model(tmp_path):
    return write(tmp_path / "model", tensors())


def test_a_copy_of_a_model_is_the_same(model, tmp_path):
    copied = shutil.copytree(model, tmp_path / "copied")
    assert weights_identity(copied) == weights_identity(model)
    assert len(weights_identity(model)) == 32


@pytest.mark.parametrize("layer", range(3))
def test_training_one_tensor_makes_another_model(layer, model, tmp_path):
    trained = tensors()
    trained[f"layer.{layer}.weight"] *= 1.001
    assert weights_identity(write(tmp_path / "other", trained)) != weights_identity(model)


@pytest.mark.parametrize("eighth", range(8))
def test_a_change_in_any_part_of_a_tensor_is_seen(eighth, model, tmp_path):
    trained = tensors()
    trained["layer.1.weight"][8 * eighth : 8 * eighth + 8] += 1.0
    assert weights_identity(write(tmp_path / "other", trained)) != weights_identity(model)


def test_other_shapes_names_and_configurations_are_other_models(model, tmp_path):
    reshaped = {name: value.reshape(96, 64) for name, value in tensors().items()}
    others = [
        write(tmp_path / "reshaped", reshaped),
        write(tmp_path / "renamed", {f"x.{name}": value for name, value in tensors().items()}),
        write(tmp_path / "configured", tensors(), config={"layers": 4}),
        write(tmp_path / "more", {**tensors(), "bias": torch.zeros(0)}),
    ]
    assert len({weights_identity(directory) for directory in [model, *others]}) == 5


def test_how_weights_are_held_and_computed_with_makes_another_model(model):
    kinds = [
        ModelConfig(),
        ModelConfig(quantization=Quantization.INT8),
        ModelConfig(dtype=DType.BFLOAT16),
    ]
    assert len({model_identity(model, kind) for kind in kinds}) == 3
    assert model_identity(model, ModelConfig(served_name="x")) == model_identity(model, kinds[0])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"null",
        (18).to_bytes(8, "little") + b'{"a":{"dtype":"F"}',
        (28).to_bytes(8, "little") + b'{"a":{"data_offsets":[9,1]}}',
    ],
)
def test_what_is_no_safetensors_file_is_refused(data, model):
    (model / "model.safetensors").write_bytes(data)
    with pytest.raises(ConfigError, match=r"^model.path: .*model.safetensors is no safetensors"):
        weights_identity(model)


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^model.path: cannot read .*config.json"):
        weights_identity(tmp_path)
