"""Finding the model, and making a converted one exactly once."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from engine.model_directory import publish_once, resolve_model
from kvferry.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def test_a_local_directory_is_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path


def test_no_such_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path.*no config\.json"):
        resolve_model(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="not bundled"):
        resolve_model("bundled:GPT-5", tmp_path)


@pytest.mark.parametrize("path", ["~no-such-user-here/model", "/" + "x" * 5000])
def test_a_path_that_cannot_be_looked_at(path: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.path"):
        resolve_model(path)


def test_written_once_by_many_at_once(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model"
    writes: list[Path] = []
    together = threading.Barrier(4)

    def write(directory: Path) -> None:
        writes.append(directory)
        assert not target.exists(), "others see it complete or not at all"
        (directory / "weights").write_text("x")

    def ask() -> None:
        together.wait(60)
        publish_once(target, write)
        assert (target / "weights").read_text() == "x"

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(writes) == 1
    publish_once(target, write)
    assert len(writes) == 1


def test_a_writer_that_dies_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    target = tmp_path / "model"

    def fail(directory: Path) -> None:
        (directory / "half").write_text("x")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        publish_once(target, fail)
    assert not target.exists()
    publish_once(target, lambda directory: (directory / "whole").touch())
    assert [file.name for file in target.iterdir()] == ["whole"]
