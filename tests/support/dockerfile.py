"""A Dockerfile as a list of instructions: what the tests of images look at."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction, its lines joined."""

    name: str
    rest: str

    @property
    def words(self) -> list[str]:
        """Of an instruction in the form of a JSON list."""
        words: list[str] = json.loads(self.rest)
        return words


def instructions_of(file: Path) -> list[Instruction]:
    """All of them, in their order."""
    lines = file.read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    joined = text.replace("\\\n", " ")
    return [Instruction(*line.split(None, 1)) for line in joined.splitlines() if line.strip()]


def last(instructions: list[Instruction], name: str) -> Instruction:
    """The one that holds for the image."""
    return [each for each in instructions if each.name == name][-1]


def copied_from_context(instructions: list[Instruction]) -> list[str]:
    """Files and folders of the checkout that are copied."""
    return [
        source
        for each in instructions
        if each.name == "COPY" and not each.rest.startswith("--from=")
        for source in each.rest.split()[:-1]
    ]


def pip_installs(instructions: list[Instruction]) -> list[str]:
    """Every `pip install` line."""
    runs = [each.rest for each in instructions if each.name == "RUN"]
    return [
        part.strip()
        for run in runs
        for part in re.split(r"&&|;", run)
        if part.strip().startswith("pip install")
    ]
