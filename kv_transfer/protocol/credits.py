"""Flow control of one lane of a link generation: sequence numbers and credits.

A credit is a staging buffer of the sink in which a receive is posted. The source sends only with
credit, so that a slow sink bounds memory and stalls nobody but its own link.
"""

from __future__ import annotations

from kv_transfer.protocol.errors import BadMessage


class SendWindow:
    """The source's end."""

    def __init__(self, buffers_max: int) -> None:
        """`buffers_max`: more credit than this at once is no peer's to give."""
        self.credits = 0
        """Receives posted at the sink that no payload has been sent for."""
        self.next_seq = 0
        self._buffers_max = buffers_max

    def credit(self, buffers: int) -> None:
        """The sink has posted that many more receives."""
        if not 1 <= buffers <= self._buffers_max - self.credits:
            raise BadMessage(f"credit of {buffers} buffers on top of {self.credits}")
        self.credits += buffers

    def take(self) -> int:
        """Use one credit; the payload's sequence number."""
        assert self.credits > 0, "sending without credit"
        self.credits -= 1
        self.next_seq += 1
        return self.next_seq - 1


class ReceiveWindow:
    """The sink's end: takes payloads in sequence, as many as it gave credits for."""

    def __init__(self) -> None:
        self.granted = 0
        self.next_seq = 0

    def grant(self, buffers: int) -> None:
        """That many more receives have been posted."""
        self.granted += buffers

    def take(self, seq: int) -> None:
        """A payload came. Raises `BadMessage` for any but the next, or one without credit."""
        if seq != self.next_seq:
            raise BadMessage(f"payload {seq} where {self.next_seq} is next")
        if seq >= self.granted:
            raise BadMessage(f"payload {seq} without credit; {self.granted} were given")
        self.next_seq += 1
