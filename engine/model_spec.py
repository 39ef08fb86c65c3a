"""The shape of a model, read from the `config.json` of its directory. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvferry.config import KvArrangement
from kvferry.errors import ConfigError
from kvferry.model_files import read_json
from mem_cache.layout import KvLayout

if TYPE_CHECKING:
    from pathlib import Path

    from kvferry.config import KvDType

_WINDOWED = "MistralForCausalLM"
"""The Llama decoder with a window on attention."""
_ARCHITECTURES = frozenset({"LlamaForCausalLM", _WINDOWED})


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Llama 3.1's stretching of low frequencies beyond the original context."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_length: int


@dataclass(frozen=True, slots=True)
class LinearRopeScaling:
    """Every position divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding: base frequency and how it is stretched, if at all."""

    theta: float
    scaling: Llama3RopeScaling | LinearRopeScaling | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the engine has to know of a Llama-family model to run it."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    rms_eps: float
    rope: RopeSpec
    context_length: int
    """Longest sequence the model was made for, in tokens."""
    eos_token_ids: tuple[int, ...]
    tied_embeddings: bool
    """The output head is the token embedding."""
    sliding_window: int | None = None
    """Tokens, itself included, that each token attends to in every layer; None: all before it."""

    def of_rank(self, ranks: int, setting: str) -> ModelSpec:
        """What each of so many tensor-parallel ranks has of it.

        Raises `ConfigError` naming `setting` where they cannot have equal parts.
        """
        shared = {"KV heads": self.num_kv_heads, "MLP columns": self.intermediate_size}
        for what, count in shared.items():
            if count % ranks:
                raise ConfigError(setting, f"is {ranks}; must divide the model's {count} {what}")
        return replace(
            self,
            num_heads=self.num_heads // ranks,
            num_kv_heads=self.num_kv_heads // ranks,
            intermediate_size=self.intermediate_size // ranks,
        )

    def kv_layout(
        self,
        dtype: KvDType,
        page_size: int,
        arrangement: KvArrangement = KvArrangement.NHD,
    ) -> KvLayout:
        """How a worker stores the KV of this model. Raises `ConfigError` for a `dtype` that it
        cannot be stored in."""
        return KvLayout(
            self.num_layers, self.num_kv_heads, self.head_dim, dtype, page_size, arrangement
        )


def load_spec(directory: Path) -> ModelSpec:
    """Read the spec of a Hugging Face directory. `ConfigError` names what is not supported."""
    config = read_json(directory / "config.json")
    _require_supported(config, directory)
    try:
        spec = _spec_of(config, directory)
    except KeyError as error:
        raise ConfigError("model.path", f"{directory}: config.json lacks {error}") from error
    except (TypeError, ValueError) as error:
        problem = f"{directory}: config.json has a value of the wrong type: {error}"
        raise ConfigError("model.path", problem) from error
    _check_ids(spec, directory)
    return spec


def _check_ids(spec: ModelSpec, directory: Path) -> None:
    beyond = [token for token in spec.eos_token_ids if not 0 <= token < spec.vocab_size]
    if beyond:
        raise ConfigError(
            "model.path",
            f"{directory}: end of text {beyond} lies outside the vocabulary of {spec.vocab_size}",
        )


def _spec_of(config: dict[str, Any], directory: Path) -> ModelSpec:
    num_heads = int(config["num_attention_heads"])
    hidden_size = int(config["hidden_size"])
    num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    if num_heads % num_kv_heads != 0:
        raise ConfigError(
            "model.path", f"{num_heads} query heads cannot share {num_kv_heads} KV heads"
        )
    return ModelSpec(
        num_layers=int(config["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=int(config.get("head_dim") or hidden_size // num_heads),
        hidden_size=hidden_size,
        intermediate_size=int(config["intermediate_size"]),
        vocab_size=int(config["vocab_size"]),
        rms_eps=float(config["rms_norm_eps"]),
        rope=_rope_spec(config),
        context_length=int(config["max_position_embeddings"]),
        eos_token_ids=_eos_token_ids(directory, config),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        sliding_window=_sliding_window(config),
    )


def _require_supported(config: dict[str, Any], directory: Path) -> None:
    architectures = config.get("architectures") or ["none named"]
    if not _ARCHITECTURES.intersection(architectures):
        known = ", ".join(sorted(_ARCHITECTURES))
        raise ConfigError(
            "model.path", f"{directory} holds {', '.join(architectures)}; supported: {known}"
        )
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name, False):
            raise ConfigError("model.path", f"{directory}: {name} is not supported")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError("model.path", f"{directory}: activation {activation} is not supported")


def _sliding_window(config: dict[str, Any]) -> int | None:
    """Llama has none, whatever its config says; later Mistrals say null."""
    window = config.get("sliding_window")
    if _WINDOWED not in config["architectures"] or window is None:
        return None
    kinds = config.get("layer_types") or []
    if any(kind != "sliding_attention" for kind in kinds):
        raise ConfigError("model.path", f"layers of the kinds {sorted(set(kinds))} in one model")
    if int(window) < 2:
        raise ConfigError("model.path", f"sliding_window is {window}; must be 2 or more")
    return int(window)


def _rope_spec(config: dict[str, Any]) -> RopeSpec:
    # transformers 5 writes `rope_parameters`; earlier versions `rope_theta` and `rope_scaling`.
    values: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(values.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    match values.get("rope_type", values.get("type", "default")):
        case "default":
            return RopeSpec(theta)
        case "linear":
            return RopeSpec(theta, LinearRopeScaling(float(values["factor"])))
        case "llama3":
            scaling = Llama3RopeScaling(
                factor=float(values["factor"]),
                low_freq_factor=float(values["low_freq_factor"]),
                high_freq_factor=float(values["high_freq_factor"]),
                original_context_length=int(values["original_max_position_embeddings"]),
            )
            return RopeSpec(theta, scaling)
        case other:
            raise ConfigError("model.path", f"rope scaling {other!r} is not supported")


def _eos_token_ids(directory: Path, config: dict[str, Any]) -> tuple[int, ...]:
    # The generation config is the more specific of the two: chat models list more ends there.
    generation = directory / "generation_config.json"
    values = read_json(generation) if generation.exists() else {}
    eos = values.get("eos_token_id", config.get("eos_token_id"))
    match eos:
        case None:
            return ()
        case bool():
            raise ConfigError("model.path", f"eos_token_id is {eos!r}; must be ids")
        case int():
            return (eos,)
        case list():
            return tuple(int(token) for token in eos)
        case _:
            raise ConfigError("model.path", f"eos_token_id is {eos!r}; must be ids")
