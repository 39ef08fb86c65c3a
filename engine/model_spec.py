"""The shape of a model, read from the `config.json` of its directory. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from engine.layer_spec import NO_BIASES, NO_OTHER_NORMS, USUAL_SCALES, Activation
from engine.model_families import find_activation, find_family
from kvferry.config import KvArrangement
from kvferry.errors import ConfigError
from kvferry.model_files import read_json
from mem_cache.layout import KvLayout

if TYPE_CHECKING:
    from pathlib import Path

    from engine.layer_spec import Biases, Experts, Norms, Scales, Windows
    from engine.model_families import Config, Family
    from engine.rope_spec import RopeSpec
    from kvferry.config import KvDType


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the engine has to know of a model to run it."""

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
    windows: Windows
    """Of each layer."""
    local_rope: RopeSpec
    """In place of `rope` in layers with a window; mostly the same."""
    activation: Activation = Activation.SILU
    biases: Biases = NO_BIASES
    norms: Norms = NO_OTHER_NORMS
    scales: Scales = USUAL_SCALES
    experts: Experts | None = None

    @property
    def sliding_window(self) -> int | None:
        """The window of every layer; None: some layer reads further back than another one, or all
        the way."""
        first = self.windows[0]
        return first if all(window == first for window in self.windows) else None

    def of_rank(self, ranks: int, setting: str) -> ModelSpec:
        """What each of so many tensor-parallel ranks has of it.

        Raises `ConfigError` naming `setting` where they cannot have equal parts.
        """
        shared = {"KV heads": self.num_kv_heads} | self._mlp_widths()
        for what, count in shared.items():
            if count % ranks:
                raise ConfigError(setting, f"is {ranks}; must divide the model's {count} {what}")
        return replace(
            self,
            num_heads=self.num_heads // ranks,
            num_kv_heads=self.num_kv_heads // ranks,
            intermediate_size=self.intermediate_size // ranks,
            experts=None if self.experts is None else self.experts.of_rank(ranks),
        )

    def _mlp_widths(self) -> dict[str, int]:
        """Columns that ranks share, by what they are of."""
        experts = self.experts
        widths = {}
        if experts is None or len(experts.layers) < self.num_layers:
            widths["MLP columns"] = self.intermediate_size
        if experts is not None:
            widths["columns of an expert"] = experts.width
            widths["columns of the shared expert"] = experts.shared_width or 0
        return widths

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
    try:
        spec = _spec_of(config, find_family(config), directory)
    except ConfigError as error:
        raise ConfigError("model.path", f"{directory}: {error.problem}") from error
    except KeyError as error:
        raise ConfigError("model.path", f"{directory}: config.json lacks {error}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        problem = f"{directory}: config.json has a value of the wrong type or size: {error}"
        raise ConfigError("model.path", problem) from error
    _check_ids(spec, directory)
    experts = spec.experts
    if experts is not None and not 0 < experts.per_token <= experts.count:
        problem = f"{directory}: {experts.per_token} of {experts.count} experts for each token"
        raise ConfigError("model.path", problem)
    return spec


def _check_ids(spec: ModelSpec, directory: Path) -> None:
    beyond = [token for token in spec.eos_token_ids if not 0 <= token < spec.vocab_size]
    if beyond:
        raise ConfigError(
            "model.path",
            f"{directory}: end of text {beyond} lies outside the vocabulary of {spec.vocab_size}",
        )


def _spec_of(config: Config, family: Family, directory: Path) -> ModelSpec:
    num_heads = int(config["num_attention_heads"])
    hidden_size = int(config["hidden_size"])
    num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    if num_heads % num_kv_heads != 0:
        raise ConfigError(
            "model.path", f"{num_heads} query heads cannot share {num_kv_heads} KV heads"
        )
    rope, local_rope = family.ropes(config)
    return ModelSpec(
        num_layers=int(config["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=int(config.get("head_dim") or family.head_dim or hidden_size // num_heads),
        hidden_size=hidden_size,
        intermediate_size=int(config["intermediate_size"]),
        vocab_size=int(config["vocab_size"]),
        rms_eps=float(config["rms_norm_eps"]),
        rope=rope,
        context_length=int(config["max_position_embeddings"]),
        eos_token_ids=_eos_token_ids(directory, config),
        tied_embeddings=bool(config.get("tie_word_embeddings", family.tied_embeddings)),
        windows=family.windows(config),
        local_rope=local_rope,
        activation=find_activation(config, family),
        biases=family.biases(config),
        norms=family.norms,
        scales=family.scales(config),
        experts=family.experts(config),
    )


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
