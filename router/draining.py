"""Whether a worker that is to leave has something left to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.ids import WorkerId
    from router.fleet import Fleet


async def has_work_at(fleet: Fleet, worker_id: WorkerId) -> bool:
    """Whether this router has an attempt there, or the worker anything of whomever.

    The worker is asked: its last word may be older than its last attempt. While it does not answer,
    it counts as busy; its death is for others to notice.
    """
    if fleet.tokens_in_flight(worker_id):
        return True
    await fleet.recheck([worker_id])
    known = [summary for summary in fleet.summaries() if summary.info.worker_id == worker_id]
    for summary in known:
        if not summary.is_reachable or summary.status is None:
            return True
        load = summary.status.load
        return load.running + load.waiting + load.handoffs > 0
    return False
