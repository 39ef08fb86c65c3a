"""How much the workers can take in: places, KV, and the prompts they compute. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.policy import ClusterView, WorkerView


@dataclass(frozen=True, slots=True)
class PrefillLane:
    """One worker that computes prompts."""

    backlog_tokens: int
    """Of the prompts it has, not computed yet."""
    tokens_per_s: float
    """0: not measured yet."""


@dataclass(frozen=True, slots=True)
class FleetCapacity:
    """What the workers can have in hand at one moment."""

    places: int
    """Sequences decoded together, over all workers. 0: nobody decodes."""
    kv_tokens: int | None
    """Slots of all workers that decode; None if unknown."""
    lanes: tuple[PrefillLane, ...]

    @property
    def backlog_tokens(self) -> int:
        """Of all lanes."""
        return sum(lane.backlog_tokens for lane in self.lanes)

    @property
    def least_backlog_tokens(self) -> int:
        """Of the lane that has least to do."""
        return min((lane.backlog_tokens for lane in self.lanes), default=0)

    @property
    def lane_tokens_per_s(self) -> float | None:
        """Mean of the lanes that were measured; None if none was."""
        rates = [lane.tokens_per_s for lane in self.lanes if lane.tokens_per_s > 0.0]
        return sum(rates) / len(rates) if rates else None


def fleet_capacity(
    view: ClusterView, running_max: int, kv_slots_per_worker: int | None
) -> FleetCapacity:
    """`running_max`: sequences that one worker decodes together."""
    decoders = len(view.decode)
    slots = kv_slots_per_worker
    return FleetCapacity(
        places=decoders * running_max,
        kv_tokens=None if slots is None else decoders * slots,
        lanes=tuple(map(_lane, _computing(view))),
    )


def uncached_tokens(view: ClusterView, prompt_tokens: int) -> int:
    """What has to be computed of a prompt, at the worker that holds most of it."""
    most = max((worker.hit_tokens for worker in _computing(view)), default=0)
    return max(1, prompt_tokens - most)


def _computing(view: ClusterView) -> Sequence[WorkerView]:
    return view.prefill or view.decode


def _lane(worker: WorkerView) -> PrefillLane:
    return PrefillLane(worker.load.prefill_tokens, worker.load.prefill_tokens_per_s)
