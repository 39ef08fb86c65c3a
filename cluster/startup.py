"""Waiting until a cluster serves that has just been started."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from cluster.member_state import Phase
from kvferry.errors import DeadlineExceeded, KvferryError
from kvferry.limits import WORKER_START_TIMEOUT_S

if TYPE_CHECKING:
    from cluster.supervisor import ClusterView
    from kvferry.clock import Clock

_POLL_S = 0.1
_LAUNCHES_MAX = 3
"""Launches of one member before starting the cluster is given up."""


class ClusterStartFailed(KvferryError):
    """A member cannot be started; the message says which and why."""


class StartedSupervisor(Protocol):
    """What is asked of the supervisor meanwhile. See `cluster.supervisor.Supervisor`."""

    def view(self) -> ClusterView:
        """The cluster as it is now."""
        ...

    def wait_for_change(self, seen: int, timeout_s: float) -> ClusterView:
        """The view as soon as its `changes` is beyond `seen`, or after `timeout_s`."""
        ...

    def unreached_workers(self) -> tuple[str, ...]:
        """Workers that some router does not reach."""
        ...


def wait_until_serving(supervisor: StartedSupervisor, clock: Clock) -> ClusterView:
    """Returns when all members run and every router reaches every worker.

    Raises `ClusterStartFailed` when a member cannot start, `DeadlineExceeded` when it takes too
    long.
    """
    view = _wait_until_complete(supervisor, clock)
    _wait_until_reachable(supervisor, clock)
    return view


def _wait_until_complete(supervisor: StartedSupervisor, clock: Clock) -> ClusterView:
    deadline = clock.now() + WORKER_START_TIMEOUT_S
    view = supervisor.view()
    while not view.is_complete:
        for report in view.reports:
            if report.failed_for_good or report.launches > _LAUNCHES_MAX:
                raise ClusterStartFailed(f"{report.name} does not start: {report.last_end}")
        if clock.now() > deadline:
            missing = [r.name for r in view.reports if r.phase is not Phase.RUNNING]
            raise DeadlineExceeded(
                f"not running after {WORKER_START_TIMEOUT_S:g} s: {', '.join(missing)}"
            )
        view = supervisor.wait_for_change(view.changes, timeout_s=1.0)
    return view


def _wait_until_reachable(supervisor: StartedSupervisor, clock: Clock) -> None:
    """A router learns of workers a moment later; until then it would do without them."""
    deadline = clock.now() + WORKER_START_TIMEOUT_S
    while missing := supervisor.unreached_workers():
        if clock.now() > deadline:
            raise DeadlineExceeded(f"the routers do not reach {', '.join(missing)}")
        time.sleep(_POLL_S)
