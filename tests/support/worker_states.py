"""Workers one by one, and the columns that the router makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvferry.membership import Role
from router.load import SLOTS_UNKNOWN, Loads
from router.policy import ClusterView, Roster, WorkersView

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvferry.membership import WorkerInfo


@dataclass(frozen=True)
class WorkerState:
    """One usable worker."""

    info: WorkerInfo
    hit_tokens: int = 0
    prefill_tokens: int = 0
    sequences: int = 0
    requests: int = 0
    active_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    link_bytes_per_s: float = 0.0
    slots_available: int | None = None
    """None: it has not reported."""
    slots_total: int | None = None


def cluster_view(workers: Iterable[WorkerState]) -> ClusterView:
    """These workers, each in the pool of its role."""
    pools: tuple[list[WorkerState], list[WorkerState]] = [], []
    for worker in workers:
        pools[worker.info.role is not Role.PREFILL].append(worker)
    return ClusterView(workers_view([*pools[0], *pools[1]]), len(pools[0]))


def workers_view(workers: Sequence[WorkerState]) -> WorkersView:
    """These workers in this order."""
    counts = [
        (
            worker.prefill_tokens,
            worker.sequences,
            worker.requests,
            worker.active_tokens,
            SLOTS_UNKNOWN if worker.slots_available is None else worker.slots_available,
            worker.slots_total or 0,
            0,
        )
        for worker in workers
    ]
    rates = [
        (worker.prefill_tokens_per_s, worker.link_bytes_per_s, float("-inf")) for worker in workers
    ]
    return WorkersView(
        Roster.of(worker.info for worker in workers),
        np.array([worker.hit_tokens for worker in workers], dtype=np.int64),
        Loads(
            np.array(counts, dtype=np.int64).reshape(-1, 7),
            np.array(rates, dtype=np.float64).reshape(-1, 3),
        ),
    )
