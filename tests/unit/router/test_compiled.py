"""Machine code on disk is that of the source, whatever became of who stored it."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

import pytest
from numba.core.caching import IndexDataCacheFile

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = """
from router.compiled import compiled, inlined

@inlined
def plus(number):
    return number + OFFSET

@compiled("int64(int64)")
def answer(number):
    return plus({factor} * number)
"""


@pytest.fixture(autouse=True)
def _no_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would take two sources of one second and one length for the same."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


class _KilledError(Exception):
    pass


def answer_of(folder: Path, offset: int, factor: int) -> int:
    """What a process answers that imports this source."""
    source = folder / "loops.py"
    source.write_text(SOURCE.format(factor=factor))
    spec = importlib.util.spec_from_file_location("loops", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # As if it had been imported from elsewhere.
    module.__dict__["OFFSET"] = offset
    spec.loader.exec_module(module)
    answer: int = module.answer(10)
    return answer


def test_a_process_that_is_killed_while_it_stores_code_leaves_none_of_a_former_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise _KilledError

    assert answer_of(tmp_path, 1, 2) == 21
    with monkeypatch.context() as patched:
        patched.setattr(IndexDataCacheFile, "_save_data", killed)
        with pytest.raises(_KilledError):
            answer_of(tmp_path, 1, 3)
    assert answer_of(tmp_path, 1, 3) == 31
    assert len(list(tmp_path.glob("__pycache__/*.nbc"))) == 2


def test_code_is_of_what_the_source_refers_to(tmp_path: Path) -> None:
    assert answer_of(tmp_path, 1, 2) == 21
    assert answer_of(tmp_path, 5, 2) == 25
    assert answer_of(tmp_path, 1, 2) == 21
    assert len(list(tmp_path.glob("__pycache__/*.nbc"))) == 2
