"""The links of one session, on the loop thread: what must not wait for the engine thread.

Rendezvous entries and chunk headers go from the session straight to the link, so that an engine
step, which takes as long as a forward pass, delays neither.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kv_transfer.events import (
    PayloadArrived,
    PayloadSent,
    ReceiverBuilt,
    ReceivesPosted,
    SenderBuilt,
)
from kv_transfer.protocol.messages import Chunk, Credit, LinkDown, LinkRendezvous
from kv_transfer.rendezvous import RendezvousStore

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from kv_transfer.link import LinkFactory, ReceivingLink, SendingLink
    from kv_transfer.session import Session


class LinkCensus:
    """How many link ends of this worker have a thread. On the loop thread."""

    def __init__(self) -> None:
        self._open = 0
        self._changed = asyncio.Event()

    def opened(self) -> None:
        """A link's thread begins."""
        self._open += 1

    def ended(self) -> None:
        """A link has reported its end."""
        self._open -= 1
        self._changed.set()

    async def all_ended(self) -> None:
        """Until no link has a thread."""
        while self._open > 0:
            self._changed.clear()
            await self._changed.wait()


class SessionLinks:
    """At most one link generation of a session; a newer one closes the one before."""

    def __init__(
        self,
        session: Session,
        factory: LinkFactory,
        timeout_s: float,
        post: Callable[[object], None],
        census: LinkCensus,
    ) -> None:
        self._session = session
        self._census = census
        self._factory = factory
        self._timeout_s = timeout_s
        self._post = post
        self._generation = 0
        self._store: RendezvousStore | None = None
        self._sender: SendingLink | None = None
        self._receiver: ReceivingLink | None = None

    def open_sender(self, generation: int) -> None:
        """Start the source's end of a new generation."""
        store = self._begin(generation)
        # Whatever the link itself will publish, the sink's end starts building now.
        self._session.send(LinkRendezvous(generation, "begin", b""))
        reporter = _SenderReporter(self._session, generation, self._post)
        self._sender = self._factory.open_sender(generation, store, reporter)
        self._post(SenderBuilt(self._session, generation, self._sender))

    def on_message(self, message: LinkRendezvous | Chunk | LinkDown) -> None:
        """A message of the peer that concerns the data plane, in order."""
        match message:
            case LinkRendezvous():
                self._on_rendezvous(message)
            case Chunk():
                if self._receiver is not None and message.link_generation == self._generation:
                    self._receiver.expect(message.link_seq, message.payload_bytes)
            case LinkDown():
                if message.link_generation == self._generation:
                    self.close(f"the peer says: {message.reason}")

    def ended(self) -> None:
        """One of the generations has reported its end."""
        self._census.ended()

    def close_generation(self, generation: int, reason: str) -> None:
        """End that generation if it is the one there is."""
        if generation == self._generation:
            self.close(reason)

    def close(self, reason: str) -> None:
        """End the generation there is."""
        if self._store is not None:
            self._store.close(reason)
        if self._sender is not None:
            self._sender.close(reason)
        if self._receiver is not None:
            self._receiver.close(reason)
        self._store = self._sender = self._receiver = None

    def _begin(self, generation: int) -> RendezvousStore:
        assert generation > self._generation, "link generations only grow"
        self.close("a newer generation begins")
        self._generation = generation
        self._census.opened()
        session = self._session

        def publish(key: str, value: bytes) -> None:
            session.send(LinkRendezvous(generation, key, value))

        self._store = RendezvousStore(publish, self._timeout_s)
        return self._store

    def _on_rendezvous(self, message: LinkRendezvous) -> None:
        generation = message.link_generation
        if generation > self._generation and not self._session.is_source:
            store = self._begin(generation)
            reporter = _ReceiverReporter(self._session, generation, self._post)
            self._receiver = self._factory.open_receiver(generation, store, reporter)
            self._post(ReceiverBuilt(self._session, generation, self._receiver))
        if generation == self._generation and self._store is not None:
            self._store.put(message.store_key, message.store_value)


class _SenderReporter:
    """A sending link's reports, as events and messages."""

    def __init__(self, session: Session, generation: int, post: Callable[[object], None]) -> None:
        self._session = session
        self._generation = generation
        self._post = post

    def built(self) -> None:
        """The sink's credit says so too, and later: nothing to report."""

    def sent(self, seq: int) -> None:
        """A payload has left."""
        self._post(PayloadSent(self._session, self._generation, seq))

    def failed(self, reason: str) -> None:
        """The generation has ended: tell the peer and the engine."""
        self._session.link_ended(self._generation, reason)


class _ReceiverReporter:
    """A receiving link's reports, as events and messages."""

    def __init__(self, session: Session, generation: int, post: Callable[[object], None]) -> None:
        self._session = session
        self._generation = generation
        self._post = post

    def built(self) -> None:
        """`posted` follows at once: nothing to report."""

    def posted(self, buffers: int) -> None:
        """Tell the engine first: a header may come as soon as the peer has the credit."""
        self._post(ReceivesPosted(self._session, self._generation, buffers))
        self._session.send(Credit(self._generation, buffers))

    def arrived(self, seq: int, buffer: int, payload: torch.Tensor) -> None:
        """A payload is there."""
        self._post(PayloadArrived(self._session, self._generation, seq, buffer, payload))

    def failed(self, reason: str) -> None:
        """The generation has ended: tell the peer and the engine."""
        self._session.link_ended(self._generation, reason)
