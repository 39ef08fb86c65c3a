"""A bug that somebody could write, and the tests that must not let it pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class MutantOutdated(Exception):
    """The code that a mutant changes is no longer there: adapt the mutant, or drop it."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One edit of one file that breaks one rule."""

    name: str
    breaks: str
    """The rule, as a sentence that this mutant makes false."""
    file: str
    """Path below the root of the source tree."""
    old: str
    """Text that the file has exactly once."""
    new: str
    tests: tuple[str, ...]
    """Tests that hold the rule, as pytest takes them: files, or one test of a slow file."""

    def mutated(self, root: Path) -> str:
        """The file's text after the edit. Raises `MutantOutdated`."""
        text = (root / self.file).read_text(encoding="utf-8")
        found = text.count(self.old)
        if found != 1:
            raise MutantOutdated(f"{self.name}: {self.file} has its text {found} times, not once")
        return text.replace(self.old, self.new)
