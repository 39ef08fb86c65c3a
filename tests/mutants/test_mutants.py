"""The suite notices seeded bugs, and the check of that notices when it doesn't."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.mutants.__main__ import run
from tests.mutants.mutant import Mutant, MutantOutdated
from tests.mutants.table import GROUPS, MUTANTS, SAMPLE
from tests.mutants.trial import ROOT

if TYPE_CHECKING:
    from pathlib import Path

TOY = Mutant(
    "toy",
    "Two is two.",
    "kvferry/toy.py",
    "TWO = 2\n",
    "TWO = 3\n",
    ("tests/test_toy.py",),
)


def test_names_are_unique_and_the_sample_is_among_them():
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)
    assert set(SAMPLE) <= set(names)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_applies_and_names_tests_that_exist(mutant):
    tree = ast.parse(mutant.mutated(ROOT))
    assert ast.dump(tree) != ast.dump(ast.parse((ROOT / mutant.file).read_text()))
    for test in mutant.tests:
        assert (ROOT / test.partition("::")[0]).is_file(), test


def test_the_sample_is_caught():
    assert run([mutant for mutant in MUTANTS if mutant.name in SAMPLE]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_all_are_caught(group):
    assert run(GROUPS[group]) == 0


# --- the check itself ---------------------------------------------------------------------------


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A source tree of one constant, and one test of it."""
    for folder in ("kvferry", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "kvferry" / "toy.py").write_text("TWO = 2\nTHREE = 3\n")
    toy_test(tmp_path, "assert TWO == 2")
    monkeypatch.setattr("tests.mutants.trial._COPIED", ("kvferry", "tests"))
    monkeypatch.setattr("tests.mutants.__main__.ROOT", tmp_path)
    return tmp_path


def toy_test(root: Path, statement: str) -> None:
    text = f"from kvferry.toy import TWO\n\ndef test_two():\n    {statement}\n"
    (root / "tests" / "test_toy.py").write_text(text)


def test_a_mutant_that_a_test_fails_for_is_caught(toy, capsys):
    assert run([TOY]) == 0
    assert "test_toy.py::test_two" in capsys.readouterr().out
    assert (toy / "kvferry" / "toy.py").read_text() == "TWO = 2\nTHREE = 3\n"


def test_what_no_test_fails_for_survives_and_what_cannot_be_collected_is_not_caught(toy, capsys):
    unseen = replace(TOY, name="unseen", old="THREE = 3", new="THREE = 4")
    broken = replace(TOY, name="broken", new="DUO = 2\n")
    assert run([TOY, unseen, broken], jobs=2) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[0] for line in lines if " s  " in line] == ["caught", "SURVIVED", "NO"]
    assert lines[-1] == "1 of 3 mutants caught"


def test_tests_that_fail_anyway_catch_nothing(toy, capsys):
    toy_test(toy, "assert TWO == 7")
    assert run([TOY]) == 1
    assert "without any mutant" in capsys.readouterr().out


@pytest.mark.slow
def test_tests_that_do_not_end_catch_nothing(toy, capsys, monkeypatch):
    toy_test(toy, "assert TWO == 2 or __import__('threading').Event().wait()")
    monkeypatch.setattr("tests.mutants.trial.TIMEOUT_S", 20.0)
    assert run([TOY]) == 1
    assert "no end within 20 s" in capsys.readouterr().out


@pytest.mark.parametrize("old", ["FOUR = 4", " = "], ids=["never", "twice"])
def test_text_that_is_not_there_once_is_an_error(toy, old):
    with pytest.raises(MutantOutdated, match="times, not once"):
        run([TOY, replace(TOY, old=old)])
