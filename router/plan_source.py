"""Who can tell what was planned, for `kvferry plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvferry.rpc.v1 import inference_pb2


class PlanSource(Protocol):
    """The planner of a cluster."""

    def plans(self, count: int) -> inference_pb2.PlansResponse:
        """Its last so many looks, the latest first; 0: all that it remembers."""
        ...
