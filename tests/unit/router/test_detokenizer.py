from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import pre_tokenizers

from router.detokenizer import (
    ByteLevelDetokenizer,
    WindowDetokenizer,
    byte_of_character,
    token_bytes,
)
from router.tokenizer import Tokenizer
from tests.support.router_model import byte_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence


def stream(detokenizer: ByteLevelDetokenizer | WindowDetokenizer, ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.push([id_]) for id_ in ids), detokenizer.flush()]


def test_the_alphabet_is_the_tokenizers_own() -> None:
    assert set(byte_of_character()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_of_character().values()) == list(range(256))


def test_a_byte_that_is_not_printable_has_a_stand_in() -> None:
    assert token_bytes("Ġthe") == b" the"


def test_an_added_token_stands_for_itself() -> None:
    assert token_bytes("<\uff5cend\uff5c>") == "<\uff5cend\uff5c>".encode()


def test_a_character_of_four_tokens_comes_whole() -> None:
    tokenizer = Tokenizer(byte_tokenizer(), None)
    ids = tokenizer.encode("🚢").tolist()
    assert stream(tokenizer.detokenizer(), ids) == ["", "", "", "🚢", ""]


def test_an_incomplete_character_at_the_end_becomes_one_replacement() -> None:
    tokenizer = Tokenizer(byte_tokenizer(), None)
    ids = tokenizer.encode("a🚢").tolist()[:-1]
    assert stream(tokenizer.detokenizer(), ids) == ["a", "", "", "", "\ufffd"]


def test_special_tokens_have_no_text() -> None:
    tokenizer = Tokenizer(byte_tokenizer(), None)
    ids = [256, *tokenizer.encode("a").tolist(), 257]
    assert stream(tokenizer.detokenizer(), ids) == ["", "a", "", ""]


def test_characters_may_begin_in_one_piece_and_end_in_another() -> None:
    tokenizer = Tokenizer(byte_tokenizer(), None)
    ids = tokenizer.encode("aé🚢b").tolist()
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.push(part) for part in (ids[:2], ids[2:5], ids[5:])] == ["a", "é", "🚢b"]
    assert detokenizer.flush() == ""


def sentencepiece_like(ids: Sequence[int]) -> str:
    """Ids below 256 are bytes, others words after a space; a text's first space is dropped."""
    data = b"".join(bytes([id_]) if id_ < 256 else f" w{id_}".encode() for id_ in ids)
    return data.decode("utf-8", "replace").removeprefix(" ")


def test_a_window_keeps_the_space_that_a_lone_token_would_lose() -> None:
    assert "".join(stream(WindowDetokenizer(sentencepiece_like), [300, 301, 302])) == (
        "w300 w301 w302"
    )


def test_a_window_holds_an_incomplete_character_back() -> None:
    ids = [300, *"é".encode(), 301]
    assert stream(WindowDetokenizer(sentencepiece_like), ids) == ["w300", "", "é", " w301", ""]


def test_a_window_of_bytes_that_make_no_character_is_bounded() -> None:
    pieces = stream(WindowDetokenizer(sentencepiece_like), [0xFF] * 20)
    assert "".join(pieces) == "\ufffd" * 20
    assert pieces[7] == "\ufffd" * 8
