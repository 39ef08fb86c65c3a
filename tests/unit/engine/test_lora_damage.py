"""Adapters whose files are damaged or say what makes no sense: refused at the start, by name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.lora_weights import load_adapters
from engine.model_spec import load_spec
from kvferry.errors import ConfigError
from tests.support.tiny_adapters import make_adapter, write_adapter_config
from tests.support.tiny_llama import make_tiny_llama

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SETTING = r"model\.adapters\.a b"


def _load(model: Path, adapter: str, dtype: torch.dtype = torch.float32) -> None:
    load_adapters({"a b": adapter}, load_spec(model), dtype)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def adapter(tmp_path: Path, model: Path) -> Path:
    return make_adapter(tmp_path / "adapter", model, seed=1, targets=("q_proj",))


@pytest.mark.parametrize(
    ("cut", "problem"),
    [
        (lambda data: data[:-4], "cannot be read"),
        (lambda data: data[:5], "cannot be read"),
        (lambda data: b"\xff" * 8 + data[8:], "cannot be read"),
        (lambda data: data + b"more", "cannot be read"),
    ],
    ids=["truncated", "no header", "header of 2**64 bytes", "too long"],
)
def test_a_damaged_file(
    model: Path, adapter: Path, cut: Callable[[bytes], bytes], problem: str
) -> None:
    _load(model, str(adapter))
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(cut(file.read_bytes()))
    with pytest.raises(ConfigError, match=rf"{SETTING}: {file.name}: {problem}"):
        _load(model, str(adapter))


@pytest.mark.parametrize("part", "AB")
@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 1e30])
def test_values_that_are_not_finite(model: Path, adapter: Path, part: str, value: float) -> None:
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    module = "model.layers.1.self_attn.q_proj"
    tensors[f"base_model.model.{module}.lora_{part}.weight"][0, 1] = value
    save_file(tensors, file)
    # 1e30 is finite in float32 only.
    with pytest.raises(ConfigError, match=rf"{SETTING}: .*'{module}' is not finite"):
        _load(model, str(adapter), torch.float16)


FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"lora_alpha": 10**400}, "lora_alpha is 1000"),
    ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
    ({"lora_alpha": 1e308}, "is not finite"),
    ({"alpha_pattern": {"q_proj": 10**400}}, r"alpha_pattern\['q_proj'\] is 1000"),
    ({"use_rslora": "false"}, "use_rslora is 'false'"),
    ({"rank_pattern": {"(?i)Q_PROJ": 4}}, "rank_pattern: .* is no regular expression"),
    ({"rank_pattern": {"a)|(b": 4}}, "rank_pattern: .* is no regular expression"),
]


@pytest.mark.parametrize(("fields", "problem"), FIELDS, ids=lambda value: str(value)[:24])
def test_fields_without_sense(
    model: Path, adapter: Path, fields: dict[str, Any], problem: str
) -> None:
    write_adapter_config(adapter, fields)
    with pytest.raises(ConfigError, match=f"{SETTING}: .*{problem}"):
        _load(model, str(adapter))


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "", json.dumps({"r": 1})])
def test_what_is_no_configuration(model: Path, adapter: Path, text: str) -> None:
    (adapter / "adapter_config.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"{SETTING}: adapter_config\.json: "):
        _load(model, str(adapter))


@pytest.mark.parametrize("directory", ["/no/such/place", "a\0b", "~nobody-of-this-name/adapter"])
def test_what_is_no_directory(model: Path, directory: str) -> None:
    with pytest.raises(ConfigError, match=f"{SETTING}: "):
        _load(model, directory)
