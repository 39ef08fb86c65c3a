"""A handoff that is not closed, as one of its sides shows it to people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.ids import Attempt, Incarnation, RequestId


@dataclass(frozen=True, slots=True)
class HandoffView:
    """What one side knows of it."""

    request_id: RequestId
    attempt: Attempt
    source_incarnation: Incarnation
    sink_incarnation: Incarnation
    is_source: bool
    """Whether the source tells this, the side that computes the prompt."""
    state: str
    """Of the side that tells it: a value of `SourceState` or `SinkState`."""
    age_s: float
    prompt_tokens: int
    computed_tokens: int = 0
    """Of the prompt; the source knows it."""
    moved_bytes: int = 0
    """What has arrived; the sink knows it."""
    total_bytes: int = 0
    """What is to arrive; 0 until the sink has room for it, and at the source."""
