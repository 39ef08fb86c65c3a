"""Where requests wait for places: admission (`router.admission`) on the event loop.

All decisions are made there; here are the futures that requests wait on and the timer that asks
again while somebody waits.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from router.admission import Admission
from router.ticket import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvferry.clock import Clock
    from kvferry.errors import KvferryError
    from router.admission_settings import AdmissionSettings
    from router.admission_snapshot import AdmissionSnapshot
    from router.fleet_capacity import FleetCapacity
    from router.request import ServiceClass
    from router.request_control import RequestControl
    from router.ticket import Ticket
    from router.work import Work

_LOOK_INTERVAL_S = 0.05
"""Between two looks at the fleet while somebody waits: nothing tells that a worker reported, or
joined. What gives a place back is noticed at once."""


class Visit:
    """One request in the waiting room, and later at its places.

    When the task that waits is cancelled, its future is at once and its ticket a little later: it
    may be granted or refused in between, of which nobody hears any more.
    """

    def __init__(self, room: WaitingRoom, ticket: Ticket) -> None:
        self.ticket = ticket
        self._room = room
        self._granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def would_wait(self, work: Work) -> bool:
        """Whether it could not begin at once."""
        room = self._room
        return room.admission.would_wait(self.ticket, work, room.clock.now(), room.capacity())

    async def wait_for_places(self, work: Work, control: RequestControl) -> None:
        """Returns with the places. Raises what the request was refused or ended with."""
        room = self._room
        room.admission.submit(self.ticket, work, room.clock.now(), room.capacity())
        room.visits[self.ticket] = self
        control.wait_for(self, self._dispatched)
        room.look()
        await self._granted
        control.goes_first = self.ticket.goes_first

    def answered(self, prompt_tokens: int, tokens: int) -> None:
        """So many tokens came; so many of the prompt had to be computed for them."""
        is_first = tokens > 0 and self.ticket.answer_tokens_done == 0
        self._room.admission.answered(self.ticket, prompt_tokens, tokens, self._room.clock.now())
        if is_first:
            self._room.look_soon()

    def abort(self, error: KvferryError) -> None:
        """End the wait with `error`; nothing if it is over."""
        if not self._granted.done():
            self._granted.set_exception(error)
            self.leave()

    def grant(self) -> None:
        """The places are there."""
        if not self._granted.done():
            self._granted.set_result(None)

    def refuse(self, error: KvferryError) -> None:
        """There will be none; the ticket has ended."""
        if not self._granted.done():
            self._granted.set_exception(error)

    def leave(self) -> None:
        """End the ticket, if it has not ended."""
        room = self._room
        room.visits.pop(self.ticket, None)
        if self.ticket.stage is not Stage.ENDED:
            room.admission.end(self.ticket, room.clock.now())
            room.look_soon()
        if not self._granted.done():
            self._granted.cancel()
        elif not self._granted.cancelled():
            self._granted.exception()  # Seen, even if whoever waited for it has gone.

    def _dispatched(self) -> None:
        if self.ticket.stage is Stage.RUNNING:
            self._room.admission.dispatched(self.ticket)
            self._room.look_soon()


class WaitingRoom:
    """All requests of one router that were not refused."""

    def __init__(
        self, settings: AdmissionSettings, capacity: Callable[[], FleetCapacity], clock: Clock
    ) -> None:
        """`capacity` says what the workers can take in now."""
        self.admission = Admission(settings)
        self.capacity = capacity
        self.clock = clock
        self.visits: dict[Ticket, Visit] = {}
        """Those that wait."""
        self._timer: asyncio.TimerHandle | None = None
        self._soon: asyncio.Handle | None = None

    @contextlib.contextmanager
    def entered(self, service_class: ServiceClass, tenant: str) -> Iterator[Visit]:
        """Count a request while inside. Raises `Overloaded` and `InvalidInput`."""
        ticket = self.admission.arrive(service_class, tenant, self.clock.now(), self.capacity())
        visit = Visit(self, ticket)
        try:
            yield visit
        finally:
            visit.leave()

    def look_soon(self) -> None:
        """Decide in this turn of the event loop, after all that is going on in it."""
        if self._soon is None and self.admission.waiting:
            self._soon = asyncio.get_running_loop().call_soon(self.look)

    def look(self) -> None:
        """Decide who is granted places, and who is refused now."""
        self._soon = None
        if not self.admission.waiting:
            return
        now = self.clock.now()
        decisions = self.admission.decide(now, self.capacity())
        for ticket, error in decisions.refused:
            self.visits.pop(ticket).refuse(error)
        for ticket in decisions.granted:
            self.visits.pop(ticket).grant()
        self._arm(now)

    def snapshot(self) -> AdmissionSnapshot:
        """What was counted."""
        return self.admission.snapshot(self.capacity())

    def close(self) -> None:
        """Nobody is here any more."""
        for handle in (self._timer, self._soon):
            if handle is not None:
                handle.cancel()
        self._timer = self._soon = None

    def _arm(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.admission.waiting:
            limit = self.admission.next_limit()
            until_s = _LOOK_INTERVAL_S if limit is None else max(0.0, limit - now)
            delay_s = min(_LOOK_INTERVAL_S, until_s + 1e-3)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.look)
