"""What identifies one handoff."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.ids import Attempt, Incarnation, RequestId


@dataclass(frozen=True, slots=True, order=True)
class HandoffKey:
    """One try of one request between two worker processes. Compared whole, never parsed."""

    request_id: RequestId
    attempt: Attempt
    source_incarnation: Incarnation
    sink_incarnation: Incarnation

    def __str__(self) -> str:
        pair = f"{self.source_incarnation:x}->{self.sink_incarnation:x}"
        return f"{self.request_id}#{self.attempt} ({pair})"
