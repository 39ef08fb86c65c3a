"""What supervisors tell, made up for tests of those who listen."""

from __future__ import annotations

from cluster.member_state import MemberReport, Phase
from cluster.supervisor import ClusterView
from kvferry.membership import Membership


def view_of(changes: int = 1, **phases: Phase) -> ClusterView:
    """Members in these phases; those that wait were killed."""
    reports = tuple(
        MemberReport(name, phase, 1, None, "killed" if phase is Phase.WAITING else "", False)
        for name, phase in phases.items()
    )
    return ClusterView(Membership(changes, ()), (), reports, changes, is_complete=True)
