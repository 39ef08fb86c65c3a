"""Turns a GGUF file into a Hugging Face directory. Needs the extra `kvferry[gguf]`, once per model.

Weights become float32 in the order in which the decoder uses them (see `engine.weights`);
tokenizer and chat template come along. `transformers` undoes what a file's architecture does to
weights: the rows of Llama's q and k are permuted there, Qwen's are not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from engine.weights import write_weights
from kvferry.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import torch

_ARCHITECTURES = frozenset({"llama", "qwen2", "qwen3"})
"""Whose metadata `transformers` translates whole. Mistral calls itself llama."""
_LAYER_ORDER = (
    "input_layernorm.weight",
    *(f"self_attn.{part}_proj.weight" for part in "qkv"),
    *(f"self_attn.{part}_proj.bias" for part in "qkv"),
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    "self_attn.o_proj.weight",
    "post_attention_layernorm.weight",
    *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
)


def import_gguf(gguf: Path, directory: Path, *, progress: bool) -> None:
    """Write `config.json`, `model.safetensors`, tokenizer and chat template into `directory`.

    `directory` exists and is the caller's alone; the caller publishes it when this returns.
    """
    transformers = _load_transformers()
    transformers.utils.logging.disable_progress_bar()
    _require_supported(gguf)
    with tqdm(total=3, desc="Tokenizer", disable=None if progress else True, unit="step") as bar:
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        tokenizer.save_pretrained(directory)
        bar.update()
        bar.set_description("Reading weights")
        model = _read_model(transformers, gguf)
        bar.update()
        bar.set_description("Writing weights")
        _write_config(model, directory)
        tied = bool(model.config.tie_word_embeddings)
        layers = int(model.config.num_hidden_layers)
        write_weights(
            directory / "model.safetensors", weights_in_order(model.state_dict(), layers, tied=tied)
        )
        bar.update()
        bar.set_description("Model ready")


def weights_in_order(
    tensors: Mapping[str, torch.Tensor], num_layers: int, *, tied: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a model by name, in the order of their use.

    Raises `ConfigError` naming one that has no place in it.
    """
    names = ["model.embed_tokens.weight"]
    for layer in range(num_layers):
        names += [f"model.layers.{layer}.{part}" for part in _LAYER_ORDER]
    names += ["model.norm.weight", "lm_head.weight"]
    unknown = sorted(tensors.keys() - set(names))
    if unknown:
        raise ConfigError("model.path", f"cannot convert the tensor {unknown[0]!r}")
    for name in names:
        if name in tensors and not (tied and name == "lm_head.weight"):
            yield name, tensors[name]


def _require_supported(gguf: Path) -> None:
    """Refuse what `transformers` would read without a word and get wrong."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(gguf)
    except (OSError, ValueError) as error:
        raise ConfigError("model.path", f"{gguf} is no GGUF file: {error}") from error

    def value(key: str) -> Any:
        field = reader.get_field(key)
        return None if field is None else field.contents()

    architecture = value("general.architecture")
    if architecture not in _ARCHITECTURES:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise ConfigError("model.path", f"{gguf} holds {architecture}; from GGUF: {known}")
    if value(f"{architecture}.expert_count"):
        raise ConfigError("model.path", f"{gguf} is a mixture of experts; those are not converted")
    scaling = value(f"{architecture}.rope.scaling.type")
    if scaling not in (None, "none"):
        raise ConfigError("model.path", f"{gguf}: rope scaling {scaling} is not converted")
    if any(tensor.name == "rope_freqs.weight" for tensor in reader.tensors):
        raise ConfigError("model.path", f"{gguf}: rope_freqs.weight is not converted")


def _read_model(transformers: Any, gguf: Path) -> Any:
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype="float32", output_loading_info=True
        )
    except (ValueError, RuntimeError) as error:
        raise ConfigError("model.path", f"{gguf} cannot be read: {error}") from error
    # Their weights would be random.
    missing = sorted(set(info["missing_keys"]) - {"lm_head.weight"})
    if missing:
        raise ConfigError("model.path", f"{gguf} has no tensor for {missing[0]!r}")
    return model


def _write_config(model: Any, directory: Path) -> None:
    config = model.config
    # The file is float32 from here on; left in, the entry would send loaders back to the GGUF.
    if "quantization_config" in config.to_dict():
        del config.quantization_config
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)


def _load_transformers() -> Any:
    try:
        import gguf as _gguf  # noqa: F401 - transformers asks for it only deep inside
        import transformers
    except ImportError as error:
        raise ConfigError(
            "model.path", f"importing a GGUF file needs `pip install kvferry[gguf]` ({error.name})"
        ) from error
    return transformers
