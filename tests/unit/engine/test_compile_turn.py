"""Who compiles, of several that want the same kernel."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from engine.compile_turn import CompileTurn
from kvferry.code_digest import name_by_content

if TYPE_CHECKING:
    from pathlib import Path
    from types import FunctionType


def _function(monkeypatch: pytest.MonkeyPatch, directory: Path) -> FunctionType:
    monkeypatch.setattr("numba.config.CACHE_DIR", str(directory))

    def doubled(x: int) -> int:
        return 2 * x

    name_by_content(doubled)  # type: ignore[arg-type]
    return doubled  # type: ignore[return-value]


def test_a_turn_is_over_once_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function = _function(monkeypatch, tmp_path)
    turn = CompileTurn(function)
    assert not turn.is_over
    with turn.held(wait=True) as is_ours:
        assert is_ours
        assert not turn.is_over
    assert turn.is_over
    assert CompileTurn(function).is_over
    assert not CompileTurn(function, "another").is_over


def test_a_turn_that_fails_is_not_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = CompileTurn(_function(monkeypatch, tmp_path))
    with pytest.raises(ValueError, match="no code"), turn.held(wait=True):
        raise ValueError("no code")
    assert not turn.is_over


def test_another_compiler_compiles_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = CompileTurn(_function(monkeypatch, tmp_path))
    with turn.held(wait=True):
        pass
    monkeypatch.setattr("numba.__version__", "0.0")
    assert not turn.is_over
    with turn.held(wait=True):
        pass
    assert turn.is_over


def test_who_does_not_wait_leaves_it_to_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = _function(monkeypatch, tmp_path)
    mine, other = CompileTurn(function), CompileTurn(function)
    waited: list[bool] = []

    def wait() -> None:
        with other.held(wait=True):
            waited.append(mine.is_over)

    thread = threading.Thread(target=wait)
    with mine.held(wait=True):
        with other.held(wait=False) as is_ours:
            assert not is_ours
        thread.start()
        thread.join(0.05)
        assert not waited
    thread.join(10)
    assert waited == [True]
