from __future__ import annotations

import pytest

from kvferry.cores import cores_in


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("", set()),
        ("0", {0}),
        ("2-5", {2, 3, 4, 5}),
        ("0-1,8", {0, 1, 8}),
        (" 3 , 3-4", {3, 4}),
        ("7-7", {7}),
    ],
)
def test_cores_and_ranges_are_read(text, cores):
    assert cores_in(text) == cores


@pytest.mark.parametrize("text", ["a", "-1", "1-", "1,,2", "1;2", "0x1", ","])
def test_what_is_no_core_is_named(text):
    with pytest.raises(ValueError, match="neither a core nor a range"):
        cores_in(text)


def test_a_range_that_runs_backwards_is_refused():
    with pytest.raises(ValueError, match="5-2 runs backwards"):
        cores_in("5-2")
