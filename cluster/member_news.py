"""What to tell whoever watches a cluster: who has ended, who is back, who has left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.member_state import Phase

if TYPE_CHECKING:
    from cluster.member_state import MemberReport
    from cluster.supervisor import ClusterView


class MemberNews:
    """What has changed from one view to the next, in lines. The first view is no news."""

    def __init__(self) -> None:
        self._seen: dict[str, Phase] | None = None

    def lines(self, view: ClusterView) -> list[str]:
        """One line for each member that is not as it was in the view before."""
        now = {report.name: report.phase for report in view.reports}
        before, self._seen = self._seen, now
        if before is None:
            return []
        changed = [each for each in view.reports if before.get(each.name) is not each.phase]
        left = [name for name in before if name not in now]
        return [_line(report) for report in changed] + [f"{name}: removed" for name in left]


def _line(report: MemberReport) -> str:
    reason = f" ({report.last_end})" if report.phase is Phase.WAITING else ""
    return f"{report.name}: {report.phase.value}{reason}"
