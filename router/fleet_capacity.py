"""How much the workers can take in: places, KV, and the prompts they compute. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

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


class LaneColumns(NamedTuple):
    """All of them, as columns: of a thousand workers, a tuple of lanes takes a millisecond to make,
    and every request asks for it."""

    backlog_tokens: NDArray[np.int64]
    tokens_per_s: NDArray[np.float64]
    first_tokens: NDArray[np.int64]

    @staticmethod
    def of(lanes: Sequence[PrefillLane]) -> LaneColumns:
        """These lanes."""
        return LaneColumns(
            np.array([lane.backlog_tokens for lane in lanes], dtype=np.int64),
            np.array([lane.tokens_per_s for lane in lanes], dtype=np.float64),
            np.array([lane.first_tokens for lane in lanes], dtype=np.int64),
        )


@dataclass(frozen=True)
class FleetCapacity:
    """What the workers can have in hand at one moment. Without slots, because a request asks for
    the same sums several times."""

    places: int
    """Sequences decoded together, over all workers. 0: nobody decodes."""
    kv_tokens: int | None
    """Slots of all workers that decode; None if unknown."""
    lanes: tuple[PrefillLane, ...] | LaneColumns

    @cached_property
    def columns(self) -> LaneColumns:
        """The lanes."""
        return self.lanes if isinstance(self.lanes, LaneColumns) else LaneColumns.of(self.lanes)

    @cached_property
    def lanes_count(self) -> int:
        """How many there are."""
        return int(self.columns.backlog_tokens.size)

    @cached_property
    def backlog_tokens(self) -> int:
        """Of all lanes."""
        return int(self.columns.backlog_tokens.sum())

    @cached_property
    def least_backlog_tokens(self) -> int:
        """Of the lane that has least to do."""
        return int(self.columns.backlog_tokens.min()) if self.lanes_count else 0

    @cached_property
    def for_first(self) -> FleetCapacity:
        """As a prompt finds it that goes first: the others do not come before it."""
        _, rates, first = self.columns
        return FleetCapacity(self.places, self.kv_tokens, LaneColumns(first, rates, first))

    def found_by(self, goes_first: bool) -> FleetCapacity:
        """As a prompt finds it."""
        return self.for_first if goes_first else self

    @cached_property
    def lane_tokens_per_s(self) -> float | None:
        """Mean of the lanes that were measured; None if none was."""
        rates = self.columns.tokens_per_s
        measured = int(np.count_nonzero(rates > 0.0))
        return float(rates.sum()) / measured if measured else None

    def least_s(self, prompt_tokens: int) -> float:
        """A prompt alone, at a worker that has nothing else to do; 0 where no rate is known."""
        rate = self.lane_tokens_per_s
        return 0.0 if rate is None else prompt_tokens / rate


def fleet_capacity(
    computing: Loads, decoders: int, running_max: int, kv_slots_per_worker: int | None
) -> FleetCapacity:
    """Of the workers that compute prompts for others, or for themselves where nobody does, and of
    so many that decode, each of which decodes `running_max` sequences together."""
    slots = kv_slots_per_worker
    lanes = LaneColumns(
        computing.prefill_tokens, computing.prefill_tokens_per_s, computing.first_tokens
    )
    return FleetCapacity(
        places=decoders * running_max,
        kv_tokens=None if slots is None else decoders * slots,
        lanes=lanes,
    )


def uncached_tokens(view: ClusterView, prompt_tokens: int) -> int:
    """What has to be computed of a prompt, at the worker that holds most of it."""
    computing = view.prefill if view.prefillers else view.decode
    return max(1, prompt_tokens - int(computing.hit_tokens.max(initial=0)))
