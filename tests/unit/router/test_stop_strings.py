from __future__ import annotations

import pytest

from router.stop_strings import StopStringScanner


def feed(scanner: StopStringScanner, *pieces: str) -> tuple[str, str | None]:
    shown = ""
    for piece in pieces:
        scan = scanner.push(piece)
        shown += scan.text
        if scan.stop is not None:
            return shown, scan.stop
    return shown, None


def test_text_before_the_stop_string_is_shown_and_nothing_after_it() -> None:
    assert feed(StopStringScanner(["END"]), "one END two") == ("one ", "END")


def test_a_stop_string_may_be_spread_over_pieces() -> None:
    assert feed(StopStringScanner(["\n\nUser:"]), "hi\n", "\n", "Us", "er", ": x") == (
        "hi",
        "\n\nUser:",
    )


def test_what_could_begin_a_stop_string_is_held_back() -> None:
    scanner = StopStringScanner(["abcd"])
    assert scanner.push("xab").text == "x"
    assert scanner.push("c").text == ""
    assert scanner.push("e").text == "abce"


def test_a_failed_match_may_hide_the_begin_of_another() -> None:
    scanner = StopStringScanner(["aab"])
    assert scanner.push("aa").text == ""
    assert scanner.push("a").text == "a"
    assert feed(scanner, "b") == ("", "aab")


def test_flush_shows_what_was_held() -> None:
    scanner = StopStringScanner(["stop"])
    assert scanner.push("wait, sto").text == "wait, "
    assert scanner.flush() == "sto"


def test_the_stop_string_that_ends_first_wins() -> None:
    assert feed(StopStringScanner(["abcdef", "cd"]), "xabcdef") == ("xab", "cd")


def test_of_two_that_end_together_the_longer_wins() -> None:
    assert feed(StopStringScanner(["b", "ab"]), "xab") == ("x", "ab")


@pytest.mark.parametrize("piece", [1, 2, 3, 7])
def test_the_cut_into_pieces_does_not_matter(piece: int) -> None:
    text = "the quick brown fox jumps over the lazy dog"
    pieces = [text[start : start + piece] for start in range(0, len(text), piece)]
    assert feed(StopStringScanner(["ox jumps o", "lazy"]), *pieces) == (
        "the quick brown f",
        "ox jumps o",
    )


def test_without_stop_strings_everything_passes() -> None:
    scanner = StopStringScanner([])
    assert scanner.push("anything").text == "anything"
    assert scanner.flush() == ""
