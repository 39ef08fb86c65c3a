"""`python -m tests` passes when both of its parts do."""

from __future__ import annotations

import pytest

from tests import __main__ as tests_main


@pytest.mark.parametrize(
    ("codes", "whole"),
    [
        ((0, 0), 0),
        ((1, 0), 1),
        ((0, 1), 1),
        ((1, 1), 1),
        ((0, 2), 2),
        ((4,), 4),
        ((5, 0), 0),
        ((0, 5), 0),
        ((1, 5), 1),
        ((5, 1), 1),
        ((5, 5), 5),
    ],
)
def test_the_whole_is_as_good_as_its_worse_part(codes, whole, monkeypatch):
    """Code 5: nothing was selected, as when a path lies in the other part."""
    coming = iter(codes)
    monkeypatch.setattr(tests_main, "_run_part", lambda part, arguments: next(coming))
    assert tests_main.run([]) == whole
    assert list(coming) == [], "a part was not run"


def test_arguments_reach_both_parts(monkeypatch):
    seen = {}

    def passes(part, arguments):
        seen[part] = arguments
        return 0

    monkeypatch.setattr(tests_main, "_run_part", passes)
    tests_main.run(["-k", "some"])
    assert seen.keys() == {"alone", "shared"}
    assert all(arguments[-2:] == ["-k", "some"] for arguments in seen.values())
