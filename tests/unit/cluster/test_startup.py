from __future__ import annotations

import pytest

from cluster.member_state import MemberReport, Phase
from cluster.startup import ClusterStartFailed, wait_until_serving
from cluster.supervisor import ClusterView
from kvferry.errors import DeadlineExceeded
from kvferry.limits import WORKER_START_TIMEOUT_S
from kvferry.membership import Membership


class ManualClock:
    def __init__(self):
        self.time = 0.0

    def now(self):
        return self.time


class FakeSupervisor:
    """Shows one view after the other, the last one for ever; each takes a while."""

    def __init__(self, clock, *reports, unreached=()):
        self.clock = clock
        self.views = list(reports)
        self.unreached = list(unreached)

    def view(self):
        report = self.views[0] if len(self.views) == 1 else self.views.pop(0)
        complete = report.phase is Phase.RUNNING
        return ClusterView(Membership(0, ()), (), (report,), 0, complete)

    def wait_for_change(self, seen, timeout_s):
        self.clock.time += 10.0
        return self.view()

    def unreached_workers(self):
        self.clock.time += 10.0
        return self.unreached.pop() if len(self.unreached) > 1 else tuple(self.unreached)


def report(phase, launches=1, for_good=False):
    return MemberReport("decode-0", phase, launches, None, "no such model", for_good)


def wait(*reports, unreached=()):
    clock = ManualClock()
    view = wait_until_serving(FakeSupervisor(clock, *reports, unreached=unreached), clock)
    return view, clock.now()


def test_it_ends_when_all_run():
    view, _ = wait(report(Phase.STARTING), report(Phase.WAITING), report(Phase.RUNNING))
    assert view.is_complete


@pytest.mark.parametrize(
    "last", [report(Phase.WAITING, for_good=True), report(Phase.STARTING, launches=4)]
)
def test_a_member_that_cannot_start_is_named_with_the_reason(last):
    with pytest.raises(ClusterStartFailed, match="decode-0 does not start: no such model"):
        wait(report(Phase.STARTING), last)


def test_one_that_takes_too_long_is_named():
    with pytest.raises(DeadlineExceeded, match=f"{WORKER_START_TIMEOUT_S:g} s: decode-0"):
        wait(report(Phase.STARTING))


def test_a_worker_that_no_router_reaches_is_named():
    with pytest.raises(DeadlineExceeded, match="do not reach decode-0"):
        wait(report(Phase.RUNNING), unreached=["decode-0"])
