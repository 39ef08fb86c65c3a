"""How much the workers can take in: places, KV, and the prompts they compute. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from router.load import Loads
    from router.policy import ClusterView


class PrefillLane(NamedTuple):
    """One worker that computes prompts."""

    backlog_tokens: int
    """Of the prompts it has, not computed yet."""
    tokens_per_s: float
    """0: not measured yet."""
    first_tokens: int = 0
    """Of the backlog, what goes before prompts that go first."""


@dataclass(frozen=True)
class FleetCapacity:
    """What the workers can have in hand at one moment. Without slots, because a request asks for
    the same sums several times."""

    places: int
    """Sequences decoded together, over all workers. 0: nobody decodes."""
    kv_tokens: int | None
    """Slots of all workers that decode; None if unknown."""
    lanes: tuple[PrefillLane, ...]

    @cached_property
    def backlog_tokens(self) -> int:
        """Of all lanes."""
        return sum(lane.backlog_tokens for lane in self.lanes)

    @cached_property
    def least_backlog_tokens(self) -> int:
        """Of the lane that has least to do."""
        return min((lane.backlog_tokens for lane in self.lanes), default=0)

    @cached_property
    def for_first(self) -> FleetCapacity:
        """As a prompt finds it that goes first: the others do not come before it."""
        lanes = tuple(lane._replace(backlog_tokens=lane.first_tokens) for lane in self.lanes)
        return FleetCapacity(self.places, self.kv_tokens, lanes)

    def found_by(self, goes_first: bool) -> FleetCapacity:
        """As a prompt finds it."""
        return self.for_first if goes_first else self

    @cached_property
    def lane_tokens_per_s(self) -> float | None:
        """Mean of the lanes that were measured; None if none was."""
        rates = [lane.tokens_per_s for lane in self.lanes if lane.tokens_per_s > 0.0]
        return sum(rates) / len(rates) if rates else None

    def least_s(self, prompt_tokens: int) -> float:
        """A prompt alone, at a worker that has nothing else to do; 0 where no rate is known."""
        rate = self.lane_tokens_per_s
        return 0.0 if rate is None else prompt_tokens / rate


def fleet_capacity(
    prefill: Loads, decode: Loads, running_max: int, kv_slots_per_worker: int | None
) -> FleetCapacity:
    """Of the workers that compute prompts for others, and of those that decode; `running_max`
    sequences are what one of these decodes together."""
    decoders = decode.sequences.size
    computing = prefill if prefill.sequences.size else decode
    backlog, rates = computing.prefill_tokens.tolist(), computing.prefill_tokens_per_s.tolist()
    slots = kv_slots_per_worker
    return FleetCapacity(
        places=decoders * running_max,
        kv_tokens=None if slots is None else decoders * slots,
        lanes=tuple(map(PrefillLane, backlog, rates, computing.first_tokens.tolist())),
    )


def uncached_tokens(view: ClusterView, prompt_tokens: int) -> int:
    """What has to be computed of a prompt, at the worker that holds most of it."""
    computing = view.prefill if view.prefillers else view.decode
    return max(1, prompt_tokens - int(computing.hit_tokens.max(initial=0)))
