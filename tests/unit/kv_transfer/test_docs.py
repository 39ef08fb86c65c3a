"""`docs/handoff.md` says what the tables say."""

from __future__ import annotations

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
