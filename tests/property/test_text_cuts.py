"""Tokens of a text's pieces are those of the whole text, and a second look finds the same."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from engine.model_directory import default_cache_dir
from router import text_cuts
from router.request import ChatMessage
from router.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.property

CODE = Path(text_cuts.__file__).read_text()
FRAGMENTS = (
    *(
        "Hello",
        " world",
        "don't",
        "I'LL",
        " 12345",
        "3.14",
        "a",
        "\u00e9",
        "e\u0301",
        "\u4e2d\u6587",
    ),
    *(" ", "  ", "     ", "\t", "\n", "\n\n", " \n ", "\r\n", "\u00a0", "\u2003", "\u180e", "\x1c"),
    *("!", "...", " ?!", "_x", "`", "\u2014", "\u037e", "\u212b", "\U0001f6a2", "\u200d"),
    *("<|im_start|>", "<|im_end|>", "<|im_", "end|>", "<|", "<|im_end|>>", "<|endoftext|>"),
    *CODE.splitlines(keepends=True)[:40],
)
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=40).map("".join)
CHARACTERS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60)


@functools.cache
def trained(pattern: str) -> Tokenizer:
    """A small vocabulary of our own code, with `pattern` for words and longer tokens added."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([CODE], trainer)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|im_end|>>"])
    tokenizer.add_tokens([AddedToken("end|>", normalized=True), AddedToken("<|", normalized=False)])
    return Tokenizer(tokenizer, None)


@functools.cache
def smollm2() -> Tokenizer:
    found = sorted(default_cache_dir().glob("SmolLM2*/tokenizer.json"))
    if not found:
        pytest.skip("the bundled model has not been converted yet")
    return load_tokenizer(found[0].parent)


def library(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    return tokenizer._tokenizer


def tokenizer_of(name: str) -> Tokenizer:
    return smollm2() if name == "smollm2" else trained(name)


KNOWN = ["smollm2", *sorted(text_cuts._WORD_PATTERNS)]


@pytest.mark.parametrize("name", KNOWN)
@given(text=st.one_of(TEXTS, CHARACTERS), piece=st.sampled_from([1, 2, 3, 10, 40]))
@example(text="a  b\n \n c<|im_end|>  d 'll \u00a0 x", piece=1)
def test_pieces_have_the_tokens_of_the_whole(name: str, text: str, piece: int) -> None:
    tokenizer = tokenizer_of(name)
    assert tokenizer._cuts.at_spaces
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_cuts, "PIECE_CHARACTERS", piece)
        pieces = list(tokenizer._cuts.pieces(text))
    assert "".join(pieces) == text
    whole = library(tokenizer).encode(text, add_special_tokens=False).ids
    parts = [library(tokenizer).encode(part, add_special_tokens=False).ids for part in pieces]
    assert [id_ for part in parts for id_ in part] == whole


TURNS = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), TEXTS), min_size=1, max_size=6)


@given(TURNS)
def test_a_conversation_that_goes_on_has_the_tokens_of_the_whole(
    turns: list[tuple[str, str]],
) -> None:
    tokenizer = smollm2()
    messages = [ChatMessage(role, content) for role, content in turns]
    assert tokenizer.chat_template is not None
    for length in (*range(1, len(messages) + 1), len(messages)):
        text = tokenizer.chat_template.render(messages[:length])
        whole = library(tokenizer).encode(text, add_special_tokens=False).ids
        assert tokenizer.encode_chat(messages[:length]).tolist() == whole
        assert tokenizer.encode(text).tolist() == library(tokenizer).encode(text).ids
    tokenizer._known.check_invariants()


@pytest.mark.parametrize("name", sorted(text_cuts._WORD_PATTERNS))
def test_the_vocabularies_are_of_the_known_kind(name: str) -> None:
    description = json.loads(library(trained(name)).to_str())
    assert text_cuts.text_cuts(description) != text_cuts.NO_CUTS
