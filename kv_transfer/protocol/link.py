"""One link generation as the engine thread sees it: what is under way, and until when."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_transfer.protocol.errors import IllegalEvent
from kv_transfer.protocol.states import LINK_TERMINAL, LINK_TRANSITIONS, LinkEvent, LinkState

if TYPE_CHECKING:
    from kv_transfer.protocol.deadlines import Deadlines


class LinkCore:
    """State of one link generation at one end. Methods take the time in seconds.

    Sequence numbers and credits of its lanes are the link threads' (`protocol.credits`).
    """

    def __init__(self, generation: int, deadlines: Deadlines, now_s: float) -> None:
        assert generation > 0
        self.generation = generation
        self.state = LinkState.BUILDING
        self.outstanding = 0
        """Bytes handed to the link that have not left, or are still expected."""
        self.used_at = now_s
        self._deadlines = deadlines.link
        self._deadline_at = now_s + self._deadlines[LinkState.BUILDING].timeout_s

    def built(self, now_s: float) -> None:
        """It carries payloads from now on; some may wait already."""
        self._advance(LinkEvent.BUILT, now_s)
        if self.outstanding:
            self._advance(LinkEvent.POSTED, now_s)

    def posted(self, payload_bytes: int, now_s: float) -> None:
        """So many more bytes are to be carried."""
        self.outstanding += payload_bytes
        if self.state in _UP:
            self._advance(LinkEvent.POSTED, now_s)

    def done(self, payload_bytes: int, now_s: float) -> None:
        """So many bytes have been carried, or need not be any more."""
        assert payload_bytes <= self.outstanding, "more was done than was posted"
        self.outstanding -= payload_bytes
        if self.state not in _UP or payload_bytes == 0:
            return
        self._advance(LinkEvent.DONE, now_s)
        if self.outstanding == 0:
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

    def _advance(self, event: LinkEvent, now_s: float) -> None:
        target = LINK_TRANSITIONS.get((self.state, event))
        if target is None:
            raise IllegalEvent(f"link {self.generation}", self.state.value, event.value)
        entered = target is not self.state
        self.state = target
        self.used_at = now_s
        if target in LINK_TERMINAL:
            return
        limit = self._deadlines[target]
        # More work is no progress: a peer that takes nothing must not live on it.
        if entered or (limit.renewed_by_progress and event is not LinkEvent.POSTED):
            self._deadline_at = now_s + limit.timeout_s


_UP = (LinkState.IDLE, LinkState.BUSY)
