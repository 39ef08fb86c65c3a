"""Flow control of one link generation: sequence numbers, credits, deadline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_transfer.protocol.errors import BadMessage, IllegalEvent
from kv_transfer.protocol.states import LINK_TERMINAL, LINK_TRANSITIONS, LinkEvent, LinkState

if TYPE_CHECKING:
    from kv_transfer.protocol.deadlines import Deadlines


class LinkCore:
    """State of one link generation at one end. Methods take the time in seconds."""

    def __init__(self, generation: int, deadlines: Deadlines, now_s: float) -> None:
        assert generation > 0
        self.generation = generation
        self.state = LinkState.BUILDING
        self.posted = 0
        """Payloads announced so far, hence the next sequence number."""
        self.done = 0
        """Payloads that have left or arrived, in order."""
        self._deadlines = deadlines.link
        self._deadline_at = now_s + self._deadlines[LinkState.BUILDING].timeout_s

    def built(self, now_s: float) -> None:
        """The group exists at this end."""
        self._advance(LinkEvent.BUILT, now_s)

    def completed(self, now_s: float) -> None:
        """The payload with sequence number `done` has left or arrived."""
        assert self.done < self.posted, "a payload completed that was never posted"
        self._advance(LinkEvent.DONE, now_s)
        self.done += 1
        if self.done == self.posted:
            self._advance(LinkEvent.ALL_DONE, now_s)

    def failed(self, now_s: float) -> None:
        """Any error ends the generation. Ending it again is no event."""
        if self.state not in LINK_TERMINAL:
            self._advance(LinkEvent.FAILED, now_s)

    def on_time(self, now_s: float) -> str | None:
        """Go down at the state's deadline; the reason if that happened now."""
        if self.state in LINK_TERMINAL or now_s < self._deadline_at:
            return None
        reason = f"deadline of a link that is {self.state.value}"
        self._advance(LinkEvent.DEADLINE, now_s)
        return reason

    @property
    def wakes_at(self) -> float | None:
        """When `on_time` has to be called next; None once down."""
        return None if self.state in LINK_TERMINAL else self._deadline_at

    def _post(self, now_s: float) -> None:
        self._advance(LinkEvent.POSTED, now_s)
        self.posted += 1

    def _advance(self, event: LinkEvent, now_s: float) -> None:
        target = LINK_TRANSITIONS.get((self.state, event))
        if target is None:
            raise IllegalEvent(f"link {self.generation}", self.state.value, event.value)
        entered = target is not self.state
        self.state = target
        if target in LINK_TERMINAL:
            return
        limit = self._deadlines[target]
        if entered or limit.renewed_by_progress:
            self._deadline_at = now_s + limit.timeout_s


class SendingLinkCore(LinkCore):
    """The source's end: sends only with credit."""

    def __init__(self, generation: int, deadlines: Deadlines, now_s: float) -> None:
        super().__init__(generation, deadlines, now_s)
        self.credits = 0
        """Receives posted at the sink that no payload has been sent for."""

    @property
    def can_send(self) -> bool:
        """Whether a payload may be posted now."""
        return self.credits > 0 and self.state in (LinkState.IDLE, LinkState.BUSY)

    def credit(self, buffers: int) -> None:
        """The sink has posted that many more receives."""
        if buffers < 1:
            raise BadMessage(f"link {self.generation}: credit of {buffers} buffers")
        self.credits += buffers

    def post(self, now_s: float) -> int:
        """Use one credit; the payload's sequence number."""
        assert self.can_send, f"link {self.generation}: sending without credit"
        seq = self.posted
        self._post(now_s)
        self.credits -= 1
        return seq


class ReceivingLinkCore(LinkCore):
    """The sink's end: takes headers in sequence, as many as it gave credits for."""

    def __init__(self, generation: int, deadlines: Deadlines, now_s: float) -> None:
        super().__init__(generation, deadlines, now_s)
        self.granted = 0
        """Credits given so far."""

    def grant(self, buffers: int) -> None:
        """That many more receives have been posted."""
        self.granted += buffers

    def announce(self, seq: int, now_s: float) -> bool:
        """A header came. False: a doubled one, to be ignored. Raises `BadMessage` for a gap."""
        if seq < self.posted:
            return False
        if seq > self.posted:
            raise BadMessage(f"link {self.generation}: payload {seq} after {self.posted - 1}")
        if seq >= self.granted:
            raise BadMessage(f"link {self.generation}: payload {seq} without credit")
        self._post(now_s)
        return True
