"""`docs/handoff.md` says what the tables say."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest

import kv_transfer
from kv_transfer import protocol
from kv_transfer.protocol import messages
from tests.support.handoff_docs import PAGE, part_names, parts, render


def test_generated_parts_are_current():
    text = PAGE.read_text()
    assert part_names(text) == set(parts())
    assert render(text) == text, "run: python -m tests.support.handoff_docs"


def test_every_message_is_in_the_message_table():
    text = PAGE.read_text()
    kinds = [*messages.SessionMessage.__args__]
    names = {kind.__name__ for kind in kinds}
    assert len(names) == 15
    for name in names:
        assert f"| `{name}" in text, name


@pytest.mark.parametrize("package", [kv_transfer, protocol], ids=lambda package: package.__name__)
def test_the_reading_order_names_every_module(package):
    text = (package.__doc__ or "").partition("Reading order:")[2]
    named = set(re.findall(r"`(\w+)`", text))
    assert named == {module.name for module in pkgutil.iter_modules(package.__path__)}


def test_every_counter_is_in_the_list():
    source = "".join(path.read_text() for path in Path(kv_transfer.__path__[0]).rglob("*.py"))
    counted = set(re.findall(r'counters\["(\w+)"\]', source))
    assert len(counted) > 10
    listed = set(re.findall(r"`(\w+)`", PAGE.read_text().partition("## Counters")[2]))
    assert counted <= listed


def test_the_tests_that_the_page_names_exist():
    root = PAGE.parents[1]
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE.read_text())
    assert len(named) > 20
    for path, test in named:
        text = (root / path).read_text()
        assert not test or f"def {test}(" in text, f"{path}::{test}"
    for pattern in re.findall(r"`tests/scenarios/([\w*]+\.txt)`", PAGE.read_text()):
        assert list((root / "tests" / "scenarios").glob(pattern)), pattern
