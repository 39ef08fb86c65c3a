"""How each supported architecture departs from Llama. Loads no torch.

A family says it by functions of a model's `config.json`. They raise `KeyError` for a value that is
missing, `TypeError` or `ValueError` for one of the wrong type, `ConfigError` for what nobody here
computes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from engine.layer_spec import (
    NO_BIASES,
    NO_OTHER_NORMS,
    USUAL_SCALES,
    Activation,
    Biases,
    ExpertNames,
    Experts,
    Norms,
    Scales,
    Windows,
)
from engine.rope_spec import RopeSpec, read_rope, read_rope_values
from kvferry.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

Config: TypeAlias = dict[str, Any]

_SLIDING, _FULL = "sliding_attention", "full_attention"
"""How `layer_types` and `rope_parameters` call the two kinds of layers."""
_QWEN_NAMES = ExpertNames("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj")
_MIXTRAL_NAMES = ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2")


def _layers(config: Config) -> range:
    return range(int(config["num_hidden_layers"]))


def _no_windows(config: Config) -> Windows:
    return (None,) * len(_layers(config))


def _every_layer(config: Config) -> Windows:
    windows = _windows(config, [_SLIDING for _ in _layers(config)])
    if config.get("sliding_window") is not None and None in windows:
        raise ConfigError("model.path", f"layer_types has {_FULL}, which this family has not")
    return windows


def _qwen_windows(config: Config) -> Windows:
    first = int(config.get("max_window_layers", 28))
    kinds = [_SLIDING if layer >= first else _FULL for layer in _layers(config)]
    return _if_switched_on(config, kinds)


def _qwen2_moe_windows(config: Config) -> Windows:
    stop = int(config.get("max_window_layers", 28))
    kinds = [_SLIDING if layer % 2 == 0 and layer < stop else _FULL for layer in _layers(config)]
    return _if_switched_on(config, kinds)


def _qwen3_moe_windows(config: Config) -> Windows:
    return _if_switched_on(config, [_SLIDING for _ in _layers(config)])


def _gemma2_windows(config: Config) -> Windows:
    return _windows(config, [_FULL if layer % 2 else _SLIDING for layer in _layers(config)])


def _gemma3_windows(config: Config) -> Windows:
    period = int(config.get("sliding_window_pattern", 6))
    return _windows(config, [_SLIDING if (n + 1) % period else _FULL for n in _layers(config)])


def _if_switched_on(config: Config, kinds: list[str]) -> Windows:
    used = config.get("use_sliding_window", False)
    return _windows(config, kinds) if used else _no_windows(config)


def _windows(config: Config, kinds: list[str]) -> Windows:
    """`kinds`: of the layers, where `layer_types` does not say it. A window of null is none."""
    window = config.get("sliding_window")
    if window is None:
        return _no_windows(config)
    if int(window) < 2:
        raise ConfigError("model.path", f"sliding_window is {window}; must be 2 or more")
    kinds = config.get("layer_types") or kinds
    if len(kinds) != len(_layers(config)):
        raise ConfigError("model.path", f"layer_types has {len(kinds)} for {len(_layers(config))}")
    unknown = sorted({*kinds} - {_SLIDING, _FULL})
    if unknown:
        raise ConfigError("model.path", f"layer_types has {unknown}, which are not supported")
    return tuple(int(window) if kind == _SLIDING else None for kind in kinds)


def _no_biases(config: Config) -> Biases:
    return NO_BIASES


def _attention_biases(config: Config) -> Biases:
    attention = bool(config.get("attention_bias", False))
    return Biases(qkv=attention, output=attention)


def _llama_biases(config: Config) -> Biases:
    return replace(_attention_biases(config), mlp=bool(config.get("mlp_bias", False)))


def _qwen2_biases(config: Config) -> Biases:
    return Biases(qkv=bool(config.get("qkv_bias", True)))


def _no_experts(config: Config) -> Experts | None:
    return None


def _mixtral_experts(config: Config) -> Experts:
    return Experts(
        count=int(config["num_local_experts"]),
        per_token=int(config["num_experts_per_tok"]),
        width=int(config["intermediate_size"]),
        normalised=True,
        layers=tuple(_layers(config)),
        names=_MIXTRAL_NAMES,
    )


def _qwen3_experts(config: Config) -> Experts:
    dense = config.get("mlp_only_layers") or []
    step = int(config.get("decoder_sparse_step", 1))
    # transformers 5 writes Qwen 3's count under Mixtral's name.
    count = config["num_experts"] if "num_experts" in config else config["num_local_experts"]
    return Experts(
        count=int(count),
        per_token=int(config["num_experts_per_tok"]),
        width=int(config["moe_intermediate_size"]),
        normalised=bool(config.get("norm_topk_prob", False)),
        layers=tuple(n for n in _layers(config) if n not in dense and (n + 1) % step == 0),
        names=_QWEN_NAMES,
    )


def _qwen2_experts(config: Config) -> Experts:
    shared = int(config["shared_expert_intermediate_size"])
    return replace(_qwen3_experts(config), shared_width=shared)


def _no_scales(config: Config) -> Scales:
    return USUAL_SCALES


def _gemma2_scales(config: Config) -> Scales:
    return _gemma_scales({"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0} | config)


def _gemma3_scales(config: Config) -> Scales:
    # Its attention has no cap, whatever its config says.
    return replace(_gemma_scales(config), score_cap=None)


def _gemma_scales(config: Config) -> Scales:
    if config.get("use_bidirectional_attention"):
        raise ConfigError("model.path", "use_bidirectional_attention is not supported")
    scores, logits = (config.get(f"{of}_logit_softcapping") for of in ("attn", "final"))
    return Scales(
        embedding=float(config["hidden_size"]) ** 0.5,
        score=float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
        score_cap=None if scores is None else float(scores),
        logit_cap=None if logits is None else float(logits),
    )


def _one_rope(config: Config) -> tuple[RopeSpec, RopeSpec]:
    rope = read_rope(config)
    return rope, rope


def _mixtral_rope(config: Config) -> tuple[RopeSpec, RopeSpec]:
    rope = read_rope(config, theta=1e6)
    return rope, rope


def _gemma3_rope(config: Config) -> tuple[RopeSpec, RopeSpec]:
    """Only layers without a window are stretched. transformers 5 nests by the kind of layer."""
    values = config.get("rope_parameters") or {}
    if _FULL in values or _SLIDING in values:
        full, sliding = values.get(_FULL) or {}, values.get(_SLIDING) or {}
        flat = {key: value for key, value in config.items() if key != "rope_theta"}
        return read_rope_values(full, flat, 1e6), read_rope_values(sliding, flat, 1e4)
    return read_rope(config, theta=1e6), RopeSpec(float(config.get("rope_local_base_freq", 1e4)))


@dataclass(frozen=True, slots=True)
class Family:
    """How to read the `config.json` of an architecture. The defaults are Llama's."""

    windows: Callable[[Config], Windows] = _no_windows
    biases: Callable[[Config], Biases] = _no_biases
    experts: Callable[[Config], Experts | None] = _no_experts
    scales: Callable[[Config], Scales] = _no_scales
    ropes: Callable[[Config], tuple[RopeSpec, RopeSpec]] = _one_rope
    """Of layers without a window, and of those with one."""
    norms: Norms = NO_OTHER_NORMS
    activation_key: str = "hidden_act"
    activation: Activation = Activation.SILU
    """Where the config names none."""
    head_dim: int | None = None
    """Where the config has none; None: hidden size over query heads."""
    tied_embeddings: bool = False
    """Where the config does not say it."""


_GEMMA2 = Family(
    windows=_gemma2_windows,
    biases=_attention_biases,
    scales=_gemma2_scales,
    norms=Norms(on_outputs=True, offset=1.0),
    activation_key="hidden_activation",
    activation=Activation.GELU_TANH,
    head_dim=256,
    tied_embeddings=True,
)
_GEMMA3 = replace(
    _GEMMA2,
    windows=_gemma3_windows,
    scales=_gemma3_scales,
    ropes=_gemma3_rope,
    norms=Norms(per_head=True, on_outputs=True, offset=1.0),
)

FAMILIES = {
    "LlamaForCausalLM": Family(biases=_llama_biases),
    "MistralForCausalLM": Family(windows=_every_layer),
    "Qwen2ForCausalLM": Family(windows=_qwen_windows, biases=_qwen2_biases),
    "Qwen3ForCausalLM": Family(
        windows=_qwen_windows,
        biases=_attention_biases,
        norms=Norms(per_head=True),
        head_dim=128,
    ),
    "MixtralForCausalLM": Family(
        windows=_every_layer, experts=_mixtral_experts, ropes=_mixtral_rope
    ),
    "Qwen2MoeForCausalLM": Family(
        windows=_qwen2_moe_windows, biases=_qwen2_biases, experts=_qwen2_experts
    ),
    "Qwen3MoeForCausalLM": Family(
        windows=_qwen3_moe_windows,
        biases=_attention_biases,
        experts=_qwen3_experts,
        norms=Norms(per_head=True),
    ),
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": _GEMMA3,
}
"""By the name that `config.json` gives in `architectures`."""


def find_family(config: Config) -> Family:
    """Raises `ConfigError` naming the architecture if there is none."""
    architectures = config.get("architectures") or ["none named"]
    for name in architectures:
        if name in FAMILIES:
            return FAMILIES[name]
    known = ", ".join(sorted(FAMILIES))
    raise ConfigError("model.path", f"holds {', '.join(architectures)}; supported: {known}")


def find_activation(config: Config, family: Family) -> Activation:
    """Raises `ConfigError` naming one that is not supported."""
    name = config.get(family.activation_key) or family.activation.value
    try:
        return Activation(name)
    except ValueError as error:
        raise ConfigError("model.path", f"activation {name} is not supported") from error
