"""Staying with a cluster that `up` has started: for launchers that restart what ends.

A container beside Ray's head shall run as long as the cluster does, and end when it is gone, so
that it is started again and brings it up again. It owns nothing: the cluster outlives it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from cluster.member_news import MemberNews
from kvferry.errors import ErrorKind, KvferryError, WorkerUnavailable
from kvferry.limits import SUPERVISOR_ABSENCE_MAX_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.supervisor import ClusterView
    from kvferry.clock import Clock

_WATCH_S = 1.0


class ClusterGone(KvferryError):
    """Nobody supervises the cluster any more."""

    kind = ErrorKind.UNAVAILABLE


class WatchedSupervisor(Protocol):
    """What is asked of the supervisor. See `cluster.supervisor.Supervisor`."""

    def wait_for_change(self, seen: int, timeout_s: float) -> ClusterView:
        """The view as soon as its `changes` is beyond `seen`, or after `timeout_s`."""
        ...


def stay(
    find_supervisor: Callable[[], WatchedSupervisor | None],
    clock: Clock,
    pause: Callable[[float], None],
    tell: Callable[[str], None],
) -> None:
    """Tell of members that end and come back, for as long as there is a supervisor.

    A supervisor may be away for `SUPERVISOR_ABSENCE_MAX_S`, in which it is started again. Ends by
    an interrupt, or raises `ClusterGone`. `pause` waits for so many seconds.
    """
    news = MemberNews()
    changes = 0
    heard_at = clock.now()
    while True:
        try:
            view = _view_of(find_supervisor(), changes)
        except WorkerUnavailable as error:
            if clock.now() - heard_at > SUPERVISOR_ABSENCE_MAX_S:
                problem = f"nobody supervises it for {SUPERVISOR_ABSENCE_MAX_S:g} s: {error}"
                raise ClusterGone(problem) from error
            pause(_WATCH_S)
            continue
        heard_at, changes = clock.now(), view.changes
        for line in news.lines(view):
            tell(line)


def _view_of(supervisor: WatchedSupervisor | None, changes: int) -> ClusterView:
    if supervisor is None:
        raise WorkerUnavailable("there is no supervisor")
    return supervisor.wait_for_change(changes, _WATCH_S)
