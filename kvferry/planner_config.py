"""The settings of the planner: targets of latency, and what it may do for them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class PlannerMode(Enum):
    """What becomes of the planner's decisions."""

    OFF = "off"
    """It makes none."""
    DRY_RUN = "dry_run"
    """They are logged and shown by `kvferry plan`."""
    ON = "on"
    """They are carried out."""


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """What to keep, how fast to act, and within which bounds."""

    mode: PlannerMode = PlannerMode.OFF
    """off, dry_run: decisions are shown and not carried out, on."""
    ttft_s: float = 2.0
    """From a request's arrival to its first token; what `attainment` of the requests shall keep."""
    itl_ms: float = 100.0
    """Between two tokens of an answer, in its mean; what `attainment` of them shall keep."""
    attainment: float = 0.9
    """Share of the requests that shall keep each of the two."""
    interval_s: float = 2.0
    """Between two looks at the cluster."""
    prefill_min: int = 1
    """Workers that compute prompts, at least."""
    decode_min: int = 1
    """Workers that decode, at least."""
    workers_min: int = 0
    """Of both roles together. The number is changed only where `workers_max` is above 0."""
    workers_max: int = 0
    """0: only roles are changed."""
    margin: float = 0.15
    """By so large a share the load of the busier role must fall, or nothing is changed."""
    hold_s: float = 10.0
    """A worker keeps a role for so long at least."""
    switches_per_minute: float = 30.0
    """Changes of roles, at most; after a rest up to a quarter of that at once."""
    resize_after_s: float = 60.0
    """How long there must be too few or too many workers before one is added or taken out."""
    drain_s: float = 600.0
    """For a worker that is taken out to do what it has."""
