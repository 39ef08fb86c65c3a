"""Turns a GGUF file into a Hugging Face directory. Needs the extra `kvferry[gguf]`, once per model.

Weights become float32 in the order in which the decoder uses them (see `engine.weights`);
tokenizer and chat template come along.
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

_LAYER_ORDER = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def import_gguf(gguf: Path, directory: Path, *, progress: bool) -> None:
    """Write `config.json`, `model.safetensors`, tokenizer and chat template into `directory`.

    `directory` exists and is the caller's alone; the caller publishes it when this returns.
    """
    transformers = _load_transformers()
    transformers.utils.logging.disable_progress_bar()
    with tqdm(total=3, desc="Tokenizer", disable=None if progress else True, unit="step") as bar:
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        tokenizer.save_pretrained(directory)
        bar.update()
        bar.set_description("Reading weights")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype="float32"
        )
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
    """The tensors of a Llama model by name, in the order of their use."""
    yield _named(tensors, "model.embed_tokens")
    for layer in range(num_layers):
        for part in _LAYER_ORDER:
            yield _named(tensors, f"model.layers.{layer}.{part}")
    yield _named(tensors, "model.norm")
    if not tied:
        yield _named(tensors, "lm_head")


def _named(tensors: Mapping[str, torch.Tensor], module: str) -> tuple[str, torch.Tensor]:
    name = f"{module}.weight"
    return name, tensors[name]


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
