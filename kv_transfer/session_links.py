"""The links of one session, on the loop thread: what must not wait for the engine thread.

Rendezvous entries and signals go from the session straight to the link ends, so that an engine
step, which takes as long as a forward pass, delays neither.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_transfer.events import ChunkTaken, LinkBuilt, PayloadSent
from kv_transfer.links.rendezvous import RendezvousStore
from kv_transfer.protocol.errors import BadMessage
from kv_transfer.protocol.messages import LinkDown, LinkRendezvous, LinkSignal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kv_transfer.chunk_header import ChunkHeader
    from kv_transfer.incoming import ReceiveDesk, TakenChunk
    from kv_transfer.links.interface import LinkEnd, LinkFactory
    from kv_transfer.outgoing import SendQueue
    from kv_transfer.protocol.messages import Signal
    from kv_transfer.session import Session
    from kvferry.clock import Clock

_BEGIN = "begin"
"""Store key of the first entry of a lane; its value names the transport."""


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


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """What the links of all sessions of a worker share."""

    factories: Mapping[str, LinkFactory]
    """By transport."""
    timeout_s: float
    post: Callable[[object], None]
    clock: Clock
    census: LinkCensus


@dataclass(slots=True, eq=False)
class _LaneEnd:
    store: RendezvousStore
    end: LinkEnd | None = None


class SessionLinks:
    """At most one link generation of a session; a newer one closes the one before."""

    def __init__(self, session: Session, desk: ReceiveDesk, settings: LinkSettings) -> None:
        self._session = session
        self._desk = desk
        self._settings = settings
        self._generation = 0
        self._lanes: dict[int, _LaneEnd] = {}
        self._expected = 0
        """Lanes that the generation has when complete."""
        self._built = 0
        self._is_over = False
        """The session is lost; what the engine asks for before it hears of that is late."""

    def open_senders(self, generation: int, transport: str, queues: Sequence[SendQueue]) -> None:
        """Start the source's ends of a new generation, one per lane."""
        if self._is_over:
            return
        self._begin(generation, len(queues))
        for lane, queue in enumerate(queues):
            # Whatever the lane itself will publish, the sink's end starts building now; and before
            # it hears that a handoff is complete with what this generation carries.
            self._session.enqueue(LinkRendezvous(generation, lane, _BEGIN, transport.encode()))
            entry, channel = self._add_lane(lane)
            entry.end = self._settings.factories[transport].open_sender(
                self._name(lane), channel, queue, _Reporter(self, self._session, generation)
            )

    def on_message(self, message: LinkRendezvous | LinkSignal | LinkDown) -> None:
        """A message of the peer that concerns the data plane, in order."""
        match message:
            case LinkRendezvous():
                self._on_rendezvous(message)
            case LinkSignal():
                self._on_signal(message)
            case LinkDown():
                if message.link_generation == self._generation:
                    self.close(f"the peer says: {message.reason}")

    def expect_lanes(self, lanes: int) -> None:
        """How many lanes the sink's end of a generation has."""
        self._expected = lanes

    def lane_built(self, generation: int) -> None:
        """One of the lanes exists at this end."""
        if generation != self._generation:
            return
        self._built += 1
        if self._built == self._expected:
            self._settings.post(LinkBuilt(self._session, generation))

    def lane_ended(self, generation: int, reason: str) -> None:
        """A lane has ended: so does its generation."""
        self._settings.census.ended()
        if generation == self._generation and self._lanes:
            self.close(reason)
            self._session.link_ended(generation, reason)

    def close_generation(self, generation: int, reason: str) -> None:
        """End that generation if it is the one there is, and tell the peer."""
        if generation == self._generation and self._lanes:
            self.close(reason)
            self._session.enqueue(LinkDown(generation, reason))

    def session_lost(self, reason: str) -> None:
        """End the generation there is; no other begins."""
        self._is_over = True
        self.close(reason)

    def close(self, reason: str) -> None:
        """End the generation there is."""
        lanes, self._lanes = self._lanes, {}
        for lane in lanes.values():
            lane.store.close(reason)
            if lane.end is not None:
                lane.end.close(reason)

    # --- inside ---

    def _begin(self, generation: int, lanes: int) -> None:
        assert generation > self._generation, "link generations only grow"
        self.close("a newer generation begins")
        self._generation, self._expected, self._built = generation, lanes, 0

    def _add_lane(self, lane: int) -> tuple[_LaneEnd, _Channel]:
        self._settings.census.opened()
        channel = _Channel(self._session, self._generation, lane, self._settings.timeout_s)
        entry = self._lanes[lane] = _LaneEnd(channel.store)
        return entry, channel

    def _name(self, lane: int) -> str:
        return f"link-{self._generation}-{lane}"

    def _on_rendezvous(self, message: LinkRendezvous) -> None:
        generation, lane = message.link_generation, message.lane
        if message.store_key == _BEGIN and not self._session.is_source:
            self._open_receiver(generation, lane, message.store_value.decode(errors="replace"))
        entry = self._lanes.get(lane)
        if entry is not None and generation == self._generation:
            entry.store.put(message.store_key, message.store_value)

    def _open_receiver(self, generation: int, lane: int, transport: str) -> None:
        if generation > self._generation:
            self._begin(generation, self._expected)
        if generation < self._generation or lane in self._lanes:
            return
        factory = self._settings.factories.get(transport)
        if factory is None or lane >= self._expected:
            raise BadMessage(f"lane {lane} of {self._expected} over {transport!r}")
        entry, channel = self._add_lane(lane)
        reporter = _Reporter(self, self._session, generation)
        entry.end = factory.open_receiver(self._name(lane), channel, lane, self._desk, reporter)

    def _on_signal(self, message: LinkSignal) -> None:
        entry = self._lanes.get(message.lane)
        if message.link_generation != self._generation or entry is None or entry.end is None:
            return
        try:
            entry.end.on_signal(message.signal, message.value)
        except BadMessage as error:
            entry.end.close(str(error))

    # --- what the reporters use ---

    @property
    def post(self) -> Callable[[object], None]:
        """To the engine thread."""
        return self._settings.post

    @property
    def clock(self) -> Clock:
        """When payloads come."""
        return self._settings.clock


class _Channel:
    """A lane end's way to the other end. Implements `LinkChannel`."""

    def __init__(self, session: Session, generation: int, lane: int, timeout_s: float) -> None:
        self._session = session
        self._generation = generation
        self._lane = lane
        self.store = RendezvousStore(self._publish, timeout_s)

    def signal(self, signal: Signal, value: int) -> None:
        """See `LinkChannel.signal`."""
        self._session.send(LinkSignal(self._generation, self._lane, signal, value))

    def _publish(self, key: str, value: bytes) -> None:
        self._session.send(LinkRendezvous(self._generation, self._lane, key, value))


class _Reporter:
    """A lane end's reports, as events. Implements both listeners; on the lane's thread."""

    def __init__(self, links: SessionLinks, session: Session, generation: int) -> None:
        self._links = links
        self._session = session
        self._generation = generation

    def built(self) -> None:
        """See the listeners."""
        self._session.on_loop(self._links.lane_built, self._generation)

    def sent(self, header: ChunkHeader) -> None:
        """See `SenderListener.sent`."""
        self._links.post(
            PayloadSent(self._session, self._generation, header.stream, header.payload_bytes)
        )

    def took(self, taken: TakenChunk) -> None:
        """See `ReceiverListener.took`."""
        now = self._links.clock.now()
        self._links.post(ChunkTaken(self._session, self._generation, taken, now))

    def failed(self, reason: str) -> None:
        """See the listeners."""
        self._session.on_loop(self._links.lane_ended, self._generation, reason)
