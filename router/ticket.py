"""One request on its way through admission. Pure.

    ARRIVED -> WAITING -> RUNNING -> ENDED, and from each of them to ENDED.

Only `router.admission` changes a ticket.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from router.work import Work

if TYPE_CHECKING:
    from router.request import ServiceClass
    from router.tenants import Tenant


class Stage(Enum):
    """How far a request has come."""

    ARRIVED = "arrived"
    """Counted; its prompt is being tokenized."""
    WAITING = "waiting"
    RUNNING = "running"
    """It holds places."""
    ENDED = "ended"


_UNKNOWN = Work(0)
"""Before its prompt is tokenized."""

_NEXT: dict[Stage, set[Stage]] = {
    Stage.ARRIVED: {Stage.WAITING, Stage.ENDED},
    Stage.WAITING: {Stage.RUNNING, Stage.ENDED},
    Stage.RUNNING: {Stage.ENDED},
    Stage.ENDED: set(),
}


@dataclass(slots=True, eq=False)
class Ticket:
    """A request, and what was counted for it."""

    service_class: ServiceClass
    tenant: Tenant
    arrived_at: float
    stage: Stage = Stage.ARRIVED
    work: Work = _UNKNOWN
    tokens_taken: int = 0
    """Of the tenant's allowance."""
    submitted_at: float = 0.0
    granted_at: float = 0.0
    wait_s: float = 0.0
    """Predicted by rates, from the known prompt to the places."""
    service_s: float = 0.0
    """Predicted by rates, from the places to the first token."""
    goes_first: bool = False
    """Workers compute its prompt before those of tenants that ask for more than their share."""
    is_dispatched: bool = False
    """Whether the fleet's load counts it by now."""
    prompt_tokens_done: int = 0
    """Computed for it."""
    answer_tokens_done: int = 0

    def move_to(self, stage: Stage) -> None:
        """Only forwards, and to the end only once."""
        assert stage in _NEXT[self.stage], f"a ticket goes from {self.stage} to {stage}"
        self.stage = stage
