"""What contract tests of the router share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.router_model import write_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Of a model as a router needs it, in a directory of its own."""
    model = tmp_path / "model"
    model.mkdir()
    return write_model(model)
