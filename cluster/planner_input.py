"""What a planner looks at: one interval of a cluster's life. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.membership import Role

if TYPE_CHECKING:
    from kvferry.ids import WorkerId


@dataclass(frozen=True, slots=True)
class DecodeSteps:
    """Steps of one worker that computed answers alone, in one interval."""

    steps: int = 0
    tokens: int = 0
    """Of all of them: one per sequence and step."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerSeen:
    """One running worker, now."""

    worker_id: WorkerId
    role: Role
    is_open: bool = True
    """Whether it is given something new: it answers, and does not drain."""
    prompt_tokens: int = 0
    """Accepted and not computed."""
    decoding: int = 0
    """Sequences that each of its steps adds a token to."""
    kv_share: float = 0.0
    """Of its KV slots, those that are neither free nor evictable."""
    prefill_tokens_per_s: float = 0.0
    """0: not measured yet."""
    decode: DecodeSteps = DecodeSteps()

    @property
    def decodes(self) -> bool:
        """Whether it is given answers to decode."""
        return self.is_open and self.role is not Role.PREFILL


@dataclass(frozen=True, slots=True)
class Latency:
    """What requests of one interval saw."""

    count: int = 0
    kept: int = 0
    """Those within the target."""
    p50_s: float = 0.0
    p90_s: float = 0.0
    """0 without requests."""

    @property
    def attainment(self) -> float:
        """Share within the target; 1 without requests."""
        return self.kept / self.count if self.count else 1.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """What routers counted in one interval, all of them together."""

    seconds: float
    requests: int = 0
    """Arrived, with those that were refused."""
    prompts: int = 0
    """Given to workers."""
    prompt_tokens: int = 0
    """Of these, what had to be computed."""
    prompt_tokens_squared: float = 0.0
    """The sum of their squares."""
    answers: int = 0
    """Ended."""
    answer_tokens: int = 0
    """Streamed."""
    waiting: int = 0
    """Requests that wait for a place at a worker, now."""
    ttft: Latency = Latency()
    itl: Latency = Latency()
    """The mean of each answer."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One look at a cluster."""

    at_s: float
    """On the planner's clock."""
    workers: tuple[WorkerSeen, ...]
    traffic: Traffic
    running_max: int
    """Sequences that a worker decodes together, at most."""
    starting: int = 0
    """Workers that are wanted and do not run yet."""
