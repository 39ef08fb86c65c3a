"""A client's request in a simulation, and its attempts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from router.load import DispatchTicket
    from router.request import ServiceClass
    from router.ticket import Ticket
    from simulator.held_request import HeldRequest
    from simulator.worker import SimWorker


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """What a client asks for."""

    index: int
    at_s: float
    prompt_tokens: int
    answer_tokens: int
    ids: NDArray[np.int32]
    """Of the full pages of its prompt, and one more."""
    service_class: ServiceClass
    tenant: str = ""
    session: int = 0


@dataclass(slots=True, eq=False)
class SimRequest:
    """What becomes of it. Times are seconds since the run began; None: it did not happen."""

    asked: Asked
    router: int
    """Number of the router that it came to."""
    ids: NDArray[np.int32]
    """Of the full pages of what is known of it, and one more."""
    place: Ticket | None = None
    attempts: int = 0
    known: int = 0
    """Tokens that its client has or sent."""
    first_token_s: float | None = None
    end_s: float | None = None
    cached_tokens: int | None = None
    moved_tokens: int | None = None
    prefill_worker: str | None = None
    decode_worker: str | None = None
    outcome: str = "failed"
    error: str | None = None

    @property
    def answer_left(self) -> int:
        """Tokens that its client still waits for."""
        return self.asked.prompt_tokens + self.asked.answer_tokens - self.known


@dataclass(slots=True, eq=False)
class Attempt:
    """One route of a request, until it ends or a worker is lost."""

    request: SimRequest
    ticket: DispatchTicket
    sink: SimWorker
    source: SimWorker | None
    sides: list[HeldRequest] = field(default_factory=list)
    """At the sink, and at the source, if there is one."""
    is_over: bool = False
    is_reserved: bool = False
    """The sink has pages for what comes."""
    is_moved: bool = False
    """All of it has come."""
    computed_to: int = 0
    sent_to: int = 0
    sent_at: float = 0.0
    """When what was sent so far is there."""
    moved: int = 0
    """Tokens sent."""

    @property
    def workers(self) -> tuple[SimWorker, ...]:
        """The sink, and the source, if there is one."""
        return (self.sink,) if self.source is None else (self.sink, self.source)

    @property
    def at_sink(self) -> HeldRequest:
        """What the decode worker has of it."""
        return self.sides[0]

    @property
    def prefill_side(self) -> tuple[SimWorker, HeldRequest]:
        """Who computes the prompt for another worker, and what it has of it."""
        assert self.source is not None, "its prompt is computed where it is decoded"
        return self.source, self.sides[1]
