"""Text properties: nothing broken, nothing lost, and independent of how a stream is cut."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.model_directory import default_cache_dir
from router.detokenizer import WindowDetokenizer
from router.stop_strings import StopStringScanner
from router.tokenizer import Tokenizer, load_tokenizer
from tests.support.router_model import VOCAB_SIZE, byte_tokenizer

if TYPE_CHECKING:
    from router.detokenizer import Detokenizer

pytestmark = pytest.mark.property

WRITING = st.text(alphabet=st.sampled_from("aé\n 中🚢👩\u200d🔬\u0301ﬁ"), max_size=40)


@functools.cache
def small() -> Tokenizer:
    return Tokenizer(byte_tokenizer(), None)


@functools.cache
def smollm2() -> Tokenizer:
    found = sorted(default_cache_dir().glob("SmolLM2*/tokenizer.json"))
    if not found:
        pytest.skip("the bundled model has not been converted yet")
    return load_tokenizer(found[0].parent)


def pieces_of(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push([id_]) for id_ in ids), detokenizer.flush()]


def check_stream(tokenizer: Tokenizer, ids: list[int]) -> None:
    """All pieces together, however cut, are what the tokenizer makes of all ids at once."""
    text = tokenizer.decode(ids)
    assert "".join(pieces_of(tokenizer.detokenizer(), ids)) == text
    for cut in (1, 3):
        by_threes = tokenizer.detokenizer()
        starts = range(cut, len(ids), 3)
        pieces = [ids[:cut], *(ids[start : start + 3] for start in starts)]
        assert "".join([*map(by_threes.push, pieces), by_threes.flush()]) == text


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=60))
def test_any_bytes_decode_as_the_tokenizer_does(ids: list[int]) -> None:
    check_stream(small(), ids)


@given(st.lists(st.integers(0, 49_151), max_size=60))
def test_any_tokens_of_a_real_vocabulary_do_too(ids: list[int]) -> None:
    check_stream(smollm2(), ids)


@given(WRITING)
def test_a_real_vocabularys_text_comes_back_without_a_broken_character(text: str) -> None:
    tokenizer = smollm2()
    pieces = pieces_of(tokenizer.detokenizer(), tokenizer.encode(text).tolist())
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@given(WRITING)
def test_the_window_decoder_agrees_on_whole_text(text: str) -> None:
    tokenizer = small()
    pieces = pieces_of(WindowDetokenizer(tokenizer.decode), tokenizer.encode(text).tolist())
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4)


def naive_scan(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The first end of any stop string, by trying every end."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(STOPS, st.lists(st.text(alphabet="abc", max_size=6), max_size=8))
def test_stop_strings_are_found_as_if_the_text_were_whole(
    stops: list[str], pieces: list[str]
) -> None:
    scanner = StopStringScanner(stops)
    shown, stop = "", None
    for piece in pieces:
        scan = scanner.push(piece)
        shown, stop = shown + scan.text, scan.stop
        if stop is not None:
            break
    else:
        shown += scanner.flush()
    assert (shown, stop) == naive_scan("".join(pieces), stops)


@given(STOPS, st.text(alphabet="abc", max_size=30))
def test_no_more_is_held_back_than_could_begin_a_stop_string(stops: list[str], text: str) -> None:
    scanner = StopStringScanner(stops)
    seen = shown = ""
    for character in text:
        seen += character
        scan = scanner.push(character)
        shown += scan.text
        if scan.stop is not None:
            return
        held = seen[len(shown) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
