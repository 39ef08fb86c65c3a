"""Who is told what a simulated worker does, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvferry.kv_events import KvEvent
    from simulator.held_request import HeldRequest
    from simulator.worker import SimWorker


class WorkerEnds(Protocol):
    """Who is told what a worker did."""

    def prompt_begun(self, request: HeldRequest) -> None:
        """The first tokens of a prompt for another worker are being computed."""
        ...

    def chunk_computed(self, request: HeldRequest, began_at: float) -> None:
        """A part of a prompt for another worker is computed, by a step that began then."""
        ...

    def prompt_computed(self, request: HeldRequest) -> None:
        """All that was known of a request is computed, so its next token is there."""
        ...

    def expects(self, request: HeldRequest) -> None:
        """There is room for what another worker is to compute."""
        ...

    def reserved(self, request: HeldRequest) -> None:
        """What another worker computes may be sent."""
        ...

    def answered(self, request: HeldRequest) -> None:
        """An answer is complete; the worker holds nothing of it any more."""
        ...


class WorkerNews(Protocol):
    """Who tells routers what a worker holds."""

    def accepted(self, worker: SimWorker, request: HeldRequest) -> None:
        """It will compute what is known of a request."""
        ...

    def changed(self, worker: SimWorker, events: Sequence[KvEvent]) -> None:
        """The radix tree holds other blocks than before."""
        ...


@dataclass(slots=True)
class WorkerCounts:
    """What a worker did since the start."""

    busy_s: float = 0.0
    retractions: int = 0
    steps_sat_out: int = 0
    decode_steps: int = 0
    """Steps without prompts, their tokens and time: what the planner goes by."""
    decode_tokens: int = 0
    decode_s: float = 0.0
