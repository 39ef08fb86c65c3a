"""A tokenizer of 211 tokens, the vocabulary of the digest model: printable bytes and some words."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from kvferry.grammar import GrammarCompiler
from tests.support.digest_model import EOS, VOCAB

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_SPECIAL = 10
"""Ids below this are special tokens; the end of text is among them."""
_SPACE, _NEWLINE = "Ġ", "Ċ"
"""How byte-level tokenizers write these."""


def _words() -> list[str]:
    bytes_ = [c for c in string.printable if c.isprintable() and c != " "]
    words = ['{"', '":', '",', '"}', "true", "false", "null", "yes", "no", "ab", "abc", "]}", "}}"]
    numbers = [f"{n:02d}" for n in range(100)]
    return [*bytes_, _SPACE, _NEWLINE, *words, *numbers][: VOCAB - _SPECIAL]


def write_tokenizer(directory: Path) -> tokenizers.Tokenizer:
    """`tokenizer.json` in `directory`, and the tokenizer itself."""
    special = [f"<special {number}>" for number in range(_SPECIAL)]
    vocab = {text: number for number, text in enumerate([*special, *_words()])}
    assert len(vocab) == VOCAB, f"{len(vocab)} tokens"
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer


class SmallVocabulary:
    """The tokenizer and a compiler for it."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer = write_tokenizer(directory)
        self.compiler = GrammarCompiler(directory, VOCAB, (EOS,))

    def text(self, token_ids: Sequence[int]) -> str:
        """Without special tokens."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def ids(self, text: str) -> list[int]:
        """One per byte."""
        return self._tokenizer.encode(text).ids
