"""The images: that what their files say is there, pinned, and nobody's root."""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvferry.config import load_config
from tests.support.command_lines import Refused, check_kvferry_command
from tests.support.dockerfile import (
    Instruction,
    copied_from_context,
    instructions_of,
    last,
    pip_installs,
)

ROOT = Path(__file__).parents[3]
IMAGE = ROOT / "deploy" / "image"
DOCKERFILES = ("Dockerfile", "Dockerfile.cuda")


def _instructions(name: str) -> list[Instruction]:
    return instructions_of(IMAGE / name)


def _pins(file: Path) -> dict[str, str]:
    lines = file.read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_everything_that_is_copied_is_there_and_let_through(name: str) -> None:
    ignored = (IMAGE / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    let_through = [line[1:] for line in ignored if line.startswith("!")]
    copied = copied_from_context(_instructions(name))
    assert copied
    for source in copied:
        assert (ROOT / source).exists(), source
        assert any(fnmatch.fnmatch(source, f"{path}*") for path in let_through), source


@pytest.mark.parametrize("name", DOCKERFILES)
def test_every_package_of_the_distribution_is_in_it(name: str) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    include = settings["tool"]["setuptools"]["packages"]["find"]["include"]
    copied = copied_from_context(_instructions(name))
    assert {pattern.rstrip("*") for pattern in include} <= set(copied)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_nothing_is_installed_that_is_not_pinned(name: str) -> None:
    installs = pip_installs(_instructions(name))
    assert len(installs) >= 4
    for line in installs:
        assert "--constraint constraints.txt" in line or "--no-deps" in line, line


def test_pins_for_gpus_add_to_the_others_and_change_none() -> None:
    extra = _pins(IMAGE / "constraints-cuda.txt")
    assert "flashinfer-python" in extra
    assert not extra.keys() & _pins(ROOT / "constraints.txt").keys()


@pytest.mark.parametrize("name", DOCKERFILES)
def test_it_runs_as_a_user_without_rights(name: str) -> None:
    user = last(_instructions(name), "USER").rest.split(":")
    assert [int(number) for number in user] == [1000, 1000]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_base_images_have_tags(name: str) -> None:
    bases = [
        each.rest for each in _instructions(name) if each.name == "ARG" and "IMAGE" in each.rest
    ]
    assert len(bases) == 1
    assert re.fullmatch(r"BASE_IMAGE=\S+:\d\S+", bases[0])


@pytest.mark.parametrize(
    ("name", "configuration"),
    [("Dockerfile", "cluster.yaml"), ("Dockerfile.cuda", "cluster-cuda.yaml")],
)
def test_it_starts_a_command_that_there_is(name: str, configuration: str) -> None:
    instructions = _instructions(name)
    words = last(instructions, "ENTRYPOINT").words + last(instructions, "CMD").words
    check_kvferry_command(" ".join(words))
    copied = f"deploy/image/{configuration} {words[-1]}"
    assert Instruction("COPY", copied) in instructions
    config = load_config(IMAGE / configuration, {}, {})
    # The address that the health check asks.
    health = last(instructions, "HEALTHCHECK").rest
    assert f":{config.router.http.port}/ready" in health
    assert config.router.host == "0.0.0.0"
    assert set(last(instructions, "EXPOSE").rest.split()) == {
        str(config.router.port),
        str(config.router.http.port),
    }


def test_the_check_of_commands_finds_unknown_flags() -> None:
    check_kvferry_command("kvferry serve --cache.page_size 64")
    for line in ("kvferry serve --cache.pages 64", "kvferry begin", "kvferry status --to x"):
        with pytest.raises(Refused):
            check_kvferry_command(line)


def test_dependencies_are_listed_as_the_project_has_them() -> None:
    command = [sys.executable, str(IMAGE / "list_dependencies.py"), "smg"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["smg"]
    assert done.stdout.splitlines() == wanted
