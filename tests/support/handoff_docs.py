"""The generated parts of `docs/handoff.md`. `python -m tests.support.handoff_docs` rewrites them.

A part stands between `<!-- generated: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from kv_transfer.protocol import states
from kv_transfer.protocol.deadlines import build_deadlines
from kvferry.config import HandoffConfig

if TYPE_CHECKING:
    from collections.abc import Mapping
    from enum import Enum

    from kv_transfer.protocol.deadlines import StateDeadline

PAGE = Path(__file__).parents[2] / "docs" / "handoff.md"
_PART = re.compile(r"(<!-- generated: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def diagram(transitions: Mapping[tuple[Enum, Enum], Enum], first: Enum) -> str:
    """A mermaid state diagram; events that join the same two states share an arrow."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for (start, event), target in transitions.items():
        arrows.setdefault((start.name, target.name), []).append(event.value)
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {first.name}"]
    lines += [f"    {a} --> {b}: {', '.join(names)}" for (a, b), names in arrows.items()]
    ends = {target.name for target in transitions.values()} - {start for start, _ in arrows}
    lines += [f"    {name} --> [*]" for name in sorted(ends)]
    return "\n".join([*lines, "```", ""])


def deadlines() -> str:
    """One row per live state."""
    table = build_deadlines(HandoffConfig().link_timeout_s)
    rows = [
        "| machine | state | whose move | at most | renewed by progress |",
        "|---|---|---|---|---|",
    ]
    machines: dict[str, Mapping[Enum, StateDeadline]] = {
        "source": table.source,
        "sink": table.sink,
        "link": table.link,
    }
    for machine, limits in machines.items():
        for state, limit in limits.items():
            renewed = "yes" if limit.renewed_by_progress else "no"
            rows.append(
                f"| {machine} | {state.name} | {limit.owner.value} | {limit.timeout_s:g} s"
                f" | {renewed} |"
            )
    return "\n".join([*rows, ""])


def parts() -> dict[str, str]:
    """Every generated part by its name."""
    return {
        "source": diagram(states.SOURCE_TRANSITIONS, states.SourceState.QUEUED),
        "sink": diagram(states.SINK_TRANSITIONS, states.SinkState.REQUESTED),
        "link": diagram(states.LINK_TRANSITIONS, states.LinkState.BUILDING),
        "session": diagram(states.SESSION_TRANSITIONS, states.SessionState.CONNECTING),
        "deadlines": deadlines(),
    }


def render(text: str) -> str:
    """`text` with every generated part as the tables have it now."""
    current = parts()
    return _PART.sub(lambda match: match[1] + current[match[2]] + match[4], text)


def part_names(text: str) -> set[str]:
    """Generated parts that `text` contains."""
    return {match[2] for match in _PART.finditer(text)}


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
