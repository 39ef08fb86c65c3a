"""The link: payloads from one source to one sink, in order, outside the control messages.

| interface | method | called by | blocks |
|---|---|---|---|
| SendingLink | send | engine thread, with credit | never |
| ReceivingLink | expect | loop thread, on a header | never |
| | recycle | engine thread, after the scatter | never |
| both | close | any thread, any number of times | never |
| listeners | all methods | the link's own thread | must not |

One object is one *generation*. It ends for good at the first error, gap or timeout, or when it is
closed, and says so once. Closing is a request: an operation in the kernel may hold the link's
thread and its buffers until the timeout, but no handoff waits for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from kv_transfer.rendezvous import RendezvousStore


class LinkClosed(Exception):
    """This side has closed the link; the message says why."""


class SenderListener(Protocol):
    """What a sending link reports."""

    def built(self) -> None:
        """The group exists here; the peer may still be building."""
        ...

    def sent(self, seq: int) -> None:
        """The payload has left its buffer."""
        ...

    def failed(self, reason: str) -> None:
        """The generation has ended. The last call."""
        ...


class ReceiverListener(Protocol):
    """What a receiving link reports."""

    def built(self) -> None:
        """The group exists here and a receive is posted in every buffer."""
        ...

    def posted(self, buffers: int) -> None:
        """That many more receives are posted: credit for the peer."""
        ...

    def arrived(self, seq: int, buffer: int, payload: torch.Tensor) -> None:
        """An expected payload is in `payload` (uint8, a view); `buffer` is to be recycled."""
        ...

    def failed(self, reason: str) -> None:
        """The generation has ended. The last call."""
        ...


class SendingLink(Protocol):
    """The source's end of one generation."""

    def send(self, seq: int, payload: torch.Tensor) -> None:
        """Send `payload` (uint8), which must stay unchanged until `sent`."""
        ...

    def close(self, reason: str) -> None:
        """End the generation."""
        ...


class ReceivingLink(Protocol):
    """The sink's end of one generation. Receives are posted ahead, in sequence."""

    def expect(self, seq: int, payload_bytes: int) -> None:
        """The header of payload `seq` has come: report it when it is there."""
        ...

    def recycle(self, buffer: int) -> None:
        """The payload in `buffer` has been used; post the next receive into it."""
        ...

    def close(self, reason: str) -> None:
        """End the generation."""
        ...


class LinkFactory(Protocol):
    """Makes the two ends of a generation, each with a thread of its own."""

    def open_sender(
        self, generation: int, store: RendezvousStore, listener: SenderListener
    ) -> SendingLink:
        """Start building the source's end."""
        ...

    def open_receiver(
        self, generation: int, store: RendezvousStore, listener: ReceiverListener
    ) -> ReceivingLink:
        """Start building the sink's end."""
        ...
