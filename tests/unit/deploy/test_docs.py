"""What the pages tell people to type: each command of ours exists, each file they name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.command_lines import Refused, check_kvferry_command

ROOT = Path(__file__).parents[3]
PAGES = ("README.md", "docs/deploy.md", "docs/first-half-hour.md", "docs/operation.md")
_BLOCK = re.compile(r"^```(?:sh)?\n(.*?)^```", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"(?:/opt/kvferry/bin/)?kvferry [a-z-]+[^|&;)`]*")
_FILE = re.compile(r"\bdeploy/[\w./-]+\w")


def commands_in(text: str) -> list[str]:
    """Every `kvferry ...` of the blocks of a page, as a shell would see it."""
    lines = [line for block in _BLOCK.findall(text) for line in block.splitlines()]
    return [
        found.strip()
        for line in lines
        for found in _COMMAND.findall(re.sub(r"(^|\s)#.*", "", line).replace("'/opt", "/opt"))
        # The end of a quoted line for another program.
        if not line.lstrip().startswith(("pip", "docker", "kubectl", "systemctl"))
    ]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_one(page: str) -> None:
    commands = commands_in((ROOT / page).read_text(encoding="utf-8"))
    assert commands
    for command in commands:
        check_kvferry_command(re.sub(r"\$\w+|\$\{\w+\}", "x", command).rstrip("' \\"))


def test_the_search_finds_commands_and_the_parser_refuses_what_is_none() -> None:
    text = "```sh\nkvferry status | head   # look\n. x; kvferry no-such\n```\nkvferry prose\n"
    assert commands_in(text) == ["kvferry status", "kvferry no-such"]
    with pytest.raises(Refused):
        check_kvferry_command("kvferry no-such")


@pytest.mark.parametrize("page", ["docs/deploy.md", "docs/security.md"])
def test_every_file_of_deploy_is_there(page: str) -> None:
    named = set(_FILE.findall((ROOT / page).read_text(encoding="utf-8")))
    assert named
    for name in named:
        assert (ROOT / name).exists(), name
