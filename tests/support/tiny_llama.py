"""A Llama with random weights, small enough for a unit test, whose greedy choices are no near-ties.

Its next token depends on the whole sequence: attention scores have a spread of about one, layers
outweigh the embedding, and the head spreads logits by tens, so that rounding does not decide.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from engine.gguf_import import weights_in_order
from engine.weights import write_weights

if TYPE_CHECKING:
    from pathlib import Path

SMOLLM2_VOCAB = 49152
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_GAIN = 1.3
_HEAD_SPREAD = 10.0


@dataclass(frozen=True, slots=True)
class TinyLlama:
    """The shape of a tiny model."""

    num_layers: int = 2
    hidden_size: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    intermediate_size: int = 128
    vocab_size: int = SMOLLM2_VOCAB
    context_length: int = 8192
    tied_embeddings: bool = False
    eos_token_id: int = 2
    seed: int = 0


def make_tiny_llama(
    directory: Path,
    shape: TinyLlama = TinyLlama(),
    *,
    rope_parameters: dict[str, Any] | None = None,
    tokenizer_from: Path | None = None,
) -> Path:
    """Write `config.json`, `generation_config.json` and `model.safetensors` (float32).

    `tokenizer_from`: a model directory whose tokenizer files are copied beside them.
    """
    directory.mkdir(parents=True, exist_ok=True)
    rope = rope_parameters or {"rope_type": "default", "rope_theta": 10_000.0}
    _write_json(directory / "config.json", _config(shape) | {"rope_parameters": rope})
    _write_json(directory / "generation_config.json", {"eos_token_id": shape.eos_token_id})
    ordered = weights_in_order(_tensors(shape), shape.num_layers, tied=shape.tied_embeddings)
    write_weights(directory / "model.safetensors", ordered)
    if tokenizer_from is not None:
        for name in _TOKENIZER_FILES:
            shutil.copy(tokenizer_from / name, directory / name)
    return directory


def _config(shape: TinyLlama) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.context_length,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": shape.tied_embeddings,
        "bos_token_id": 1,
        "eos_token_id": shape.eos_token_id,
        "dtype": "float32",
    }


def _tensors(shape: TinyLlama) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(shape.seed)

    def normal(rows: int, width: int, gain: float) -> torch.Tensor:
        return torch.randn(rows, width, generator=generator) * (gain / width**0.5)

    def norm() -> torch.Tensor:
        return 1.0 + 0.1 * torch.randn(shape.hidden_size, generator=generator)

    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    tensors = {"model.embed_tokens.weight": normal(shape.vocab_size, hidden, _HEAD_SPREAD)}
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": norm(),
            f"{prefix}.self_attn.q_proj.weight": normal(queries, hidden, _GAIN),
            f"{prefix}.self_attn.k_proj.weight": normal(kv, hidden, _GAIN),
            f"{prefix}.self_attn.v_proj.weight": normal(kv, hidden, _GAIN),
            # Updates outweigh the embedding: a tied head would else repeat the input token.
            f"{prefix}.self_attn.o_proj.weight": normal(hidden, queries, 8 * _GAIN),
            f"{prefix}.post_attention_layernorm.weight": norm(),
            f"{prefix}.mlp.gate_proj.weight": normal(inner, hidden, _GAIN),
            f"{prefix}.mlp.up_proj.weight": normal(inner, hidden, _GAIN),
            f"{prefix}.mlp.down_proj.weight": normal(hidden, inner, 8 * _GAIN),
        }
    tensors["model.norm.weight"] = norm()
    if not shape.tied_embeddings:
        tensors["lm_head.weight"] = normal(shape.vocab_size, hidden, _HEAD_SPREAD)
    return tensors


def _write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2), encoding="utf-8")
