"""What the front doors of one router share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry.clock import MonotonicClock

if TYPE_CHECKING:
    from kvferry.clock import Clock
    from router.api.request_metrics import RequestMetrics
    from router.api.security import Security
    from router.cluster_control import ClusterControl
    from router.plan_source import PlanSource
    from router.router import Router


@dataclass(frozen=True, slots=True)
class DoorSettings:
    """Whom they ask, and whom they let in."""

    router: Router
    metrics: RequestMetrics
    """Counts the requests of all doors."""
    security: Security | None = None
    """None: anybody may call, in the clear, for whichever tenant they name."""
    control: ClusterControl | None = None
    """Carries out what operators order. None: nobody can be added or removed."""
    planner: PlanSource | None = None
    """None: nobody plans."""
    shares_ports: bool = False
    """A successor opens them before this router closes them; nobody else has them, which is
    checked before a cluster starts."""
    clock: Clock = field(default_factory=MonotonicClock)
