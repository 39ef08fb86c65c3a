"""Who is in the cluster, as the supervisor publishes it and routers and workers read it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.ids import Incarnation, WorkerId


class Role(Enum):
    """What the router uses a worker for. Every worker is able to do all of it."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
    """Prefill and decode of a request in the same worker, without a handoff."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One live worker process. A restart changes `incarnation` and usually `address`."""

    worker_id: WorkerId
    role: Role
    incarnation: Incarnation
    address: str
    """host:port of its gRPC server."""
    is_draining: bool = False
    """It finishes what it has and is given nothing new."""


@dataclass(frozen=True, slots=True)
class Membership:
    """All live workers. A higher version replaces a lower one whole."""

    version: int
    workers: tuple[WorkerInfo, ...]
