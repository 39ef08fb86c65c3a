"""What the router must know of a model, read from its directory without loading any of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvferry.errors import ConfigError
from kvferry.model_files import read_json
from mem_cache.layout import KvLayout

if TYPE_CHECKING:
    from pathlib import Path

    from kvferry.config import KvDType


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The served model's limits."""

    vocab_size: int
    context_length: int
    """Longest prompt + answer in tokens."""
    eos_token_ids: tuple[int, ...]
    kv_bytes_per_token: int


def read_model_card(directory: Path, dtype: KvDType, context_length_max: int) -> ModelCard:
    """Read `config.json` and `generation_config.json`.

    `dtype` is that of the KV. The context is bounded by both the model and `context_length_max`.
    Raises `ConfigError` naming `model.path` when the directory does not describe a model.
    """
    config = read_json(directory / "config.json")
    generation_file = directory / "generation_config.json"
    generation = read_json(generation_file) if generation_file.exists() else {}
    heads = _positive(config, "num_attention_heads")
    kv_heads = _positive(config, "num_key_value_heads", default=heads)
    head_dim = _positive(config, "head_dim", default=_positive(config, "hidden_size") // heads)
    layers = _positive(config, "num_hidden_layers")
    trained = _positive(config, "max_position_embeddings", default=context_length_max)
    return ModelCard(
        vocab_size=_positive(config, "vocab_size"),
        context_length=min(trained, context_length_max),
        eos_token_ids=_eos_ids(generation if "eos_token_id" in generation else config),
        kv_bytes_per_token=KvLayout(layers, kv_heads, head_dim, dtype, 1).bytes_per_token,
    )


def _positive(config: dict[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or value < 1:
        raise ConfigError("model.path", f"config.json: {name} is {value!r}; must be an integer > 0")
    return value


def _eos_ids(config: dict[str, Any]) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(entry, int) for entry in ids):
        raise ConfigError("model.path", f"eos_token_id is {value!r}; must be token ids")
    return tuple(ids)
