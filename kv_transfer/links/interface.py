"""A link end: one lane of one generation, at the source or at the sink.

| interface | method | called by | blocks |
|---|---|---|---|
| LinkFactory | open_sender, open_receiver | loop thread | never |
| LinkEnd | on_signal | loop thread | never |
| | close | any thread, any number of times | never |
| SendQueue | next_chunk | the sender's thread | for a copy in memory |
| ReceiveDesk | take | the receiver's thread | for a copy in memory |
| listeners | all methods | the link's own thread | must not |

An end has a thread of its own, which never waits without a deadline, except for work of its own
side in a way that `close` interrupts. A generation ends for good at the first error, gap or
timeout, or when it is closed, and says so once. Closing is a request: an operation in the kernel
may hold the thread and its staging buffers until its timeout, but no handoff waits for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kv_transfer.chunk_header import ChunkHeader
    from kv_transfer.incoming import ReceiveDesk, TakenChunk
    from kv_transfer.links.rendezvous import RendezvousStore
    from kv_transfer.outgoing import SendQueue
    from kv_transfer.protocol.messages import Signal


class LinkClosed(Exception):
    """This side has closed the link; the message says why."""


class LinkChannel(Protocol):
    """What an end has of its session."""

    @property
    def store(self) -> RendezvousStore:
        """Through which the two ends find one another."""
        ...

    def signal(self, signal: Signal, value: int) -> None:
        """Tell the other end, in order. From any thread; never blocks."""
        ...


class SenderListener(Protocol):
    """What a source's end reports."""

    def built(self) -> None:
        """The connection exists here; the peer may still be building."""
        ...

    def sent(self, header: ChunkHeader) -> None:
        """A payload has left its buffer."""
        ...

    def failed(self, reason: str) -> None:
        """The end has ended. The last call, and made once."""
        ...


class ReceiverListener(Protocol):
    """What a sink's end reports."""

    def built(self) -> None:
        """The connection exists here and payloads can be received."""
        ...

    def took(self, taken: TakenChunk) -> None:
        """The desk has dealt with a payload."""
        ...

    def failed(self, reason: str) -> None:
        """The end has ended. The last call, and made once."""
        ...


class LinkEnd(Protocol):
    """One end, in the hands of its session."""

    def on_signal(self, signal: Signal, value: int) -> None:
        """The other end says so, in order. What it cannot mean ends the generation."""
        ...

    def close(self, reason: str) -> None:
        """End it."""
        ...


class LinkFactory(Protocol):
    """Makes the ends of one transport, each with a thread of its own."""

    def open_sender(
        self, name: str, channel: LinkChannel, queue: SendQueue, listener: SenderListener
    ) -> LinkEnd:
        """Start building the source's end, which sends what comes into `queue`."""
        ...

    def open_receiver(
        self,
        name: str,
        channel: LinkChannel,
        lane: int,
        desk: ReceiveDesk,
        listener: ReceiverListener,
    ) -> LinkEnd:
        """Start building the sink's end, which gives what comes to `desk`."""
        ...
