"""Settings of every test: how hard Hypothesis tries, and markers that follow from the folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    import pytest

settings.register_profile("dev", max_examples=25, deadline=None)
settings.register_profile(
    "ci",
    max_examples=50,
    deadline=None,
    derandomize=True,
    print_blob=True,
    # Two busy cores make data generation slow now and then; that is no fault of a test.
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("nightly", max_examples=2000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

_ROOT = Path(__file__).parent
_MARKED_FOLDERS = ("property", "simulation", "cluster", "gpu")
_ALONE = ("cluster", "end_to_end", "faults")
"""Folders whose tests start clusters or run the real model: they take all cores."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Golden transcripts can be written anew; `python -m tests` runs one part, then the other."""
    parser.addoption("--rewrite-scenarios", action="store_true")
    parser.addoption("--soak-minutes", type=float, default=30.0)
    parser.addoption("--scenario-minutes", type=float, default=0.0)
    parser.addoption("--part", choices=("alone", "shared"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test in tests/<marker>/ has that marker, so that nobody forgets it."""
    for item in items:
        if _folder(item) in _MARKED_FOLDERS:
            item.add_marker(_folder(item))
    part = config.getoption("--part")
    if part is not None:
        others = [item for item in items if (_folder(item) in _ALONE) != (part == "alone")]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if (_folder(item) in _ALONE) == (part == "alone")]


def _folder(item: pytest.Item) -> str:
    return item.path.relative_to(_ROOT).parts[0]
