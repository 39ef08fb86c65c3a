"""Reading a model's shape, and refusing what cannot be run."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from engine.model_spec import load_spec
from engine.rope_spec import LinearRopeScaling, Llama3RopeScaling, RopeSpec, YarnRopeScaling
from kvferry.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


OTHERS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "max_window_layers": 2,
    "num_experts": 6,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
}
"""What other families want to know."""


def _write(directory: Path, changes: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(BASE | changes))
    return directory


def test_head_dim_follows_from_the_others(tmp_path: Path) -> None:
    spec = load_spec(_write(tmp_path, {}))
    assert spec.head_dim == 64
    assert spec.eos_token_ids == (2,)
    assert spec.rope == RopeSpec(10_000.0)
    assert load_spec(_write(tmp_path, {"head_dim": 32})).head_dim == 32


def test_without_kv_heads_every_head_has_its_own(tmp_path: Path) -> None:
    assert load_spec(_write(tmp_path, {"num_key_value_heads": None})).num_kv_heads == 9


@pytest.mark.parametrize(("eos", "expected"), [(None, ()), (7, (7,)), ([7, 8], (7, 8))])
def test_the_generation_config_decides_the_ends(
    tmp_path: Path, eos: Any, expected: tuple[int, ...]
) -> None:
    _write(tmp_path, {"eos_token_id": 5})
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert load_spec(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": 1e5}, RopeSpec(1e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, RopeSpec(1e6)),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}},
            RopeSpec(1e4, LinearRopeScaling(4.0)),
        ),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            RopeSpec(5e5, Llama3RopeScaling(8.0, 1.0, 4.0, 8192)),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            RopeSpec(1e4, YarnRopeScaling(4.0, 8192, 0.1 * math.log(4.0) + 1.0)),
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": None,
                    "mscale": 1.0,
                    "mscale_all_dim": 2.0,
                    "original_max_position_embeddings": 2048,
                    "beta_fast": 16,
                    "truncate": False,
                }
            },
            RopeSpec(
                1e4,
                YarnRopeScaling(
                    4.0,
                    2048,
                    (0.1 * math.log(4.0) + 1.0) / (0.2 * math.log(4.0) + 1.0),
                    beta_fast=16.0,
                    whole_dimensions=False,
                ),
            ),
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, RopeSpec(1e4)),
    ],
)
def test_rope(tmp_path: Path, changes: dict[str, Any], expected: RopeSpec) -> None:
    assert load_spec(_write(tmp_path, changes)).rope == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": None}, "none named"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_key_value_heads": 2}, "cannot share"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rms_norm_eps": None}, "wrong type"),
        ({"vocab_size": "many"}, "wrong type"),
        ({"vocab_size": 100, "eos_token_id": 100}, "outside the vocabulary of 100"),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_spec(_write(tmp_path, changes))


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("name", "changes", "windows"),
    [
        ("Qwen2", {"sliding_window": 8}, (None, None, None, None)),
        ("Qwen3", {"use_sliding_window": True, "sliding_window": 8}, (None, None, 8, 8)),
        ("Qwen2Moe", {"use_sliding_window": True, "sliding_window": 8}, (8, None, None, None)),
        ("Qwen3Moe", {"use_sliding_window": True, "sliding_window": 8}, (8, 8, 8, 8)),
        ("Mixtral", {"sliding_window": None}, (None, None, None, None)),
        ("Gemma2", {"sliding_window": 8}, (8, None, 8, None)),
        ("Gemma3", {"sliding_window": 8, "sliding_window_pattern": 3}, (8, 8, None, 8)),
        (
            "Gemma3",
            {"sliding_window": 8, "layer_types": [FULL, FULL, SLIDING, FULL]},
            (None, None, 8, None),
        ),
    ],
)
def test_windows_of_layers(
    name: str, changes: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    spec = load_spec(_write(tmp_path, OTHERS | {"architectures": [f"{name}ForCausalLM"]} | changes))
    assert spec.windows == windows
    assert spec.sliding_window == (windows[0] if len(set(windows)) == 1 else None)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Mistral", {"layer_types": [FULL, SLIDING] * 2}, "full_attention"),
        ("Mistral", {"layer_types": [FULL] * 4}, "full_attention"),
        ("Gemma3", {"layer_types": [FULL]}, "layer_types has 1 for 4"),
        ("Gemma3", {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ("Gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Qwen3Moe", {"num_experts": None}, "wrong type"),
        ("Mixtral", {"num_experts_per_tok": 7}, "7 of 6 experts"),
        ("Gemma2", {"hidden_activation": "relu"}, "activation relu"),
    ],
)
def test_what_a_family_refuses(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = OTHERS | {"architectures": [f"{name}ForCausalLM"], "sliding_window": 8} | changes
    with pytest.raises(ConfigError, match=message):
        load_spec(_write(tmp_path, config))


def test_a_mixture_needs_the_number_of_its_experts(tmp_path: Path) -> None:
    config = {key: value for key, value in OTHERS.items() if "experts" not in key}
    with pytest.raises(ConfigError, match="lacks 'num_local_experts'"):
        load_spec(_write(tmp_path, config | {"architectures": ["Qwen3MoeForCausalLM"]}))


def test_gemma_rotates_by_kind_of_layer(tmp_path: Path) -> None:
    """As configs before transformers 5 say it: only full attention is stretched."""
    old = {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "sliding_window": 8}
    old |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    spec = load_spec(_write(tmp_path, OTHERS | old | {"architectures": ["Gemma3ForCausalLM"]}))
    assert spec.rope == RopeSpec(5e5, LinearRopeScaling(8.0))
    assert spec.local_rope == RopeSpec(2e4)


def test_unreadable_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        load_spec(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_nesting_beyond_measure(tmp_path: Path, name: str) -> None:
    _write(tmp_path, OTHERS)
    (tmp_path / name).write_text('{"a":' + "[" * 100_000)
    with pytest.raises(ConfigError, match=rf"model\.path: .*{name} is not valid JSON"):
        load_spec(tmp_path)


@pytest.mark.parametrize(
    "value", [{"hidden_size": 1e999}, {"num_attention_heads": 0, "num_key_value_heads": 0}]
)
def test_values_that_cannot_be_computed_with(tmp_path: Path, value: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"model\.path: .*config\.json"):
        load_spec(_write(tmp_path, OTHERS | value))


@pytest.mark.slow
def test_loads_no_torch() -> None:
    code = "import sys, engine.model_spec; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
