"""Which tokenizers' texts may be cut, and where."""

from __future__ import annotations

import json

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from router.text_cuts import _WORD_PATTERNS, NO_CUTS, PIECE_CHARACTERS, TextCuts, text_cuts
from tests.support.router_model import byte_tokenizer

LONG = "x" * PIECE_CHARACTERS


def made(
    pre_tokenizer: object = None, *added: AddedToken, normalizer: object = None
) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={"x": 0}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens(list(added))
    return tokenizer


def cuts_of(tokenizer: tokenizers.Tokenizer) -> TextCuts:
    return text_cuts(json.loads(tokenizer.to_str()))


def word_splitter(pattern: str, behavior: str = "isolated") -> object:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


@pytest.mark.parametrize("pattern", sorted(_WORD_PATTERNS))
def test_known_word_patterns_break_at_spaces(pattern: str) -> None:
    assert cuts_of(made(word_splitter(pattern))).at_spaces
    assert cuts_of(made(word_splitter(pattern), normalizer=normalizers.NFC())).at_spaces
    assert not cuts_of(made(word_splitter(pattern, "removed"))).at_spaces


@pytest.mark.parametrize(
    "tokenizer",
    [
        byte_tokenizer(),
        made(word_splitter(r"\w+ \w+")),
        made(None, AddedToken("two words", special=True, normalized=False)),
    ],
)
def test_no_cut_at_spaces_where_a_word_or_a_token_may_go_over_one(
    tokenizer: tokenizers.Tokenizer,
) -> None:
    cuts = cuts_of(tokenizer)
    assert cuts is not NO_CUTS
    assert not cuts.at_spaces


@pytest.mark.parametrize(
    "tokenizer",
    [
        tokenizers.Tokenizer(models.Unigram([("x", 0.0)])),
        tokenizers.Tokenizer(models.BPE(vocab={"x": 0}, merges=[])),
        tokenizers.Tokenizer(models.BPE(vocab={"x": 0}, merges=[], dropout=0.5)),
        made(pre_tokenizers.Metaspace()),
        made(normalizer=normalizers.Lowercase()),
        made(None, AddedToken("<m>", lstrip=True)),
        made(None, AddedToken("<m>", rstrip=True)),
        made(None, AddedToken("<m>", single_word=True)),
    ],
)
def test_a_tokenizer_that_is_not_known_well_gives_no_cuts(
    tokenizer: tokenizers.Tokenizer,
) -> None:
    assert cuts_of(tokenizer) == NO_CUTS


def test_pieces_end_at_the_first_safe_place_behind_their_length() -> None:
    cuts = cuts_of(made(None, AddedToken("<e>", normalized=False)))
    assert list(cuts.pieces("a b<e>c")) == ["a b<e>c"]
    assert list(cuts.pieces(f"a b{LONG}  c d")) == [f"a b{LONG}", "  c d"]
    assert list(cuts.pieces(f"{LONG}<e>c d<e>{LONG} e")) == [f"{LONG}<e>", f"c d<e>{LONG}", " e"]
    assert list(cuts.pieces(f"{LONG}\n a\u00a0 b")) == [f"{LONG}\n a\u00a0 b"]
    assert list(cuts.pieces(f"{LONG}<e>")) == [f"{LONG}<e>"]
    assert list(cuts.pieces("")) == [""]


def test_the_longest_token_wins() -> None:
    names = (AddedToken("<e>", normalized=False), AddedToken("<e>>", normalized=False))
    cuts = cuts_of(made(word_splitter(r"\w+ \w+"), *names))
    assert list(cuts.pieces(f"{LONG}<e>>b")) == [f"{LONG}<e>>", "b"]


def test_a_text_that_goes_on_keeps_its_cuts() -> None:
    cuts = cuts_of(made(None, AddedToken("<e>", normalized=False)))
    text = f"{LONG} a{LONG}<e>b{LONG} {LONG}"
    before, after = list(cuts.pieces(text)), list(cuts.pieces(text + f"c<e>{LONG} d"))
    assert len(before) == 4
    assert after[: len(before) - 1] == before[:-1]
