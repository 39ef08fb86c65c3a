"""docs/limits.md and the code say the same."""

from __future__ import annotations

import ast
import functools
import math
import re
from pathlib import Path

import pytest

from kvferry import limits
from kvferry.config import settings
from kvferry.config_checks import _ABOVE_ZERO, _AT_LEAST, _AT_MOST

ROOT = Path(__file__).parents[3]
ROW = re.compile(
    r"\| `(?P<name>[^`]+)` \| (?P<default>[^|]+) \| (?P<range>[^|]*)\| (?P<hit>[^|]+) \|"
)
UNITS = {"": 1, "MiB": 2**20, "GiB": 2**30}
OF_THEMSELVES = ("", "s", "ms", "B", "tokens", "characters")
BOUND_NOTHING = (
    re.compile(r"workers\.(prefill|decode|both)\."),  # What there is, not what is let in.
    re.compile(r"router\.(http\.|smg\.)?port"),
    re.compile(r"router\.classes\.\w+\.weight"),
    re.compile(r"speculation\.ngram\.(match_min|match_max|step_cost_tokens)"),
    re.compile(r"cache\.page_size|tracing\.sample_ratio|planner\.(ttft_s|itl_ms)"),
)


@functools.cache
def rows() -> dict[str, re.Match[str]]:
    text = (ROOT / "docs/limits.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    found = [ROW.fullmatch(line) for line in lines]
    assert all(found), [line for line, row in zip(lines, found, strict=True) if row is None]
    by_name = {row["name"]: row for row in found if row is not None}
    assert len(by_name) == len(found), "some limit is there twice"
    return by_name


def constants() -> dict[str, float]:
    return {name: value for name, value in vars(limits).items() if name.isupper()}


def bounds() -> dict[str, float]:
    """Settings that are numbers, but for those that bound nothing."""
    return {
        name: value
        for name, value in settings()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and not any(pattern.match(name) for pattern in BOUND_NOTHING)
    }


def number_in(text: str) -> float:
    number, _, unit = text.strip().partition(" ")
    if unit not in OF_THEMSELVES:
        return float(number.replace(",", "")) * UNITS[unit]
    return float(number.replace(",", ""))


def value_in_file(name: str) -> float:
    file, _, constant = name.partition(":")
    for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=found)], value=value) if found == constant:
                return float(_computed(value))
    raise AssertionError(f"{name} is not in its file")


def _computed(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _computed(left) * _computed(right)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return float(_computed(left) ** _computed(right))
        case ast.BinOp(left=left, op=ast.LShift(), right=right):
            return int(_computed(left)) << int(_computed(right))
    raise AssertionError(ast.unparse(node))


def test_every_fixed_limit_and_every_setting_that_bounds_something_is_told():
    assert set(constants()) | set(bounds()) == {name for name in rows() if ":" not in name}


def test_defaults_are_those_of_the_code():
    known = constants() | bounds()
    told = {name: number_in(row["default"]) for name, row in rows().items()}
    real = {name: known[name] if name in known else value_in_file(name) for name in told}
    wrong = {name for name in told if not math.isclose(told[name], real[name], rel_tol=1e-9)}
    assert not wrong


def test_ranges_are_those_that_settings_are_checked_for():
    for name, row in rows().items():
        expected = {">": 0.0} if name in _ABOVE_ZERO else {}
        expected |= {">=": float(_AT_LEAST[name])} if name in _AT_LEAST else {}
        expected |= {"<=": float(_AT_MOST[name])} if name in _AT_MOST else {}
        parts = [part.split() for part in row["range"].replace(", ", ";").split(";")]
        told = {part[0]: number_in(part[1]) for part in parts if part}
        assert told == pytest.approx(expected), name


@pytest.mark.parametrize(
    ("text", "number"), [("16 MiB", 2**24), ("65,536", 65536), ("0.05 s", 0.05)]
)
def test_numbers_are_read_with_their_units(text, number):
    assert number_in(text) == number
