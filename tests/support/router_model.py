"""A model directory just large enough for a router: byte-level tokenizer, limits, chat template."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from kvferry.cache_key import build_extra_key
from kvferry.weights_identity import weights_identity

if TYPE_CHECKING:
    from kvferry.ids import ExtraKey

VOCAB_SIZE = 264
EOS_ID = 257
"""Ids 0-255 are the bytes in the order of their characters; then `<s>`, `</s>`, `<|end|>`."""

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def byte_tokenizer() -> tokenizers.Tokenizer:
    """One token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: id_ for id_, character in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|end|>"])
    return tokenizer


def write_model(directory: Path, context_length: int = 512) -> Path:
    """Write the files a router reads."""
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    config = {
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": context_length,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 32,
        "eos_token_id": EOS_ID,
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": CHAT_TEMPLATE, "eos_token": {"content": "</s>"}})
    )
    return directory


@functools.cache
def extra_key(salt: str = "") -> ExtraKey:
    """Of requests to a router that serves what `write_model` writes."""
    with tempfile.TemporaryDirectory() as directory:
        identity = weights_identity(write_model(Path(directory)))
    return build_extra_key(f"{identity}-float32", salt=salt)
