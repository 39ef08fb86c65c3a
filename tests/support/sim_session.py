"""Sessions of the simulator: two wires, real `SessionLinks`, and breaks at any message."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kv_transfer.events import LinkFailed, MessageCame, SessionLost, SessionOpened
from kv_transfer.incoming import ReceiveDesk
from kv_transfer.protocol.errors import BadMessage
from kv_transfer.protocol.lanes import lanes_between
from kv_transfer.protocol.messages import LinkDown, LinkRendezvous, LinkSignal
from kv_transfer.session_links import SessionLinks
from tests.support.sim_link import Pipe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kv_transfer.incoming import IncomingStream
    from kv_transfer.outgoing import SendQueue
    from kv_transfer.protocol.lanes import Lane
    from kv_transfer.protocol.messages import Hello, SessionMessage
    from kvferry.generation import PrefillSource
    from tests.support.sim_worker import SimWorker


class Pair:
    """The two ends of one conversation, and what is under way between them."""

    def __init__(self, sink: SimWorker, source: PrefillSource, number: int) -> None:
        self.name = f"s{number}"
        self.expected = source
        self.sink = SimSession(sink, self, is_source=False)
        self.source: SimSession | None = None
        self.is_broken = False
        self._pipes: dict[str, Pipe] = {}

    @property
    def is_over(self) -> bool:
        """Whether both ends are gone; a source's end that never was is."""
        return self.sink.is_lost and (self.source is None or self.source.is_lost)

    @property
    def ends(self) -> list[SimSession]:
        """Those that exist."""
        return [self.sink] if self.source is None else [self.sink, self.source]

    def other(self, end: SimSession) -> SimSession | None:
        """The peer's end."""
        return self.source if end is self.sink else self.sink

    def pipe(self, name: str) -> Pipe:
        """The lane of that generation."""
        return self._pipes.setdefault(name, Pipe())

    def greet(self, source: SimWorker | None) -> None:
        """The call has reached the address: whoever is there answers."""
        sink = self.sink.worker
        if source is None or source.incarnation != self.expected.incarnation:
            self.is_broken = True
            self.sink.lost("another incarnation answers" if source else "nobody answers")
            return
        end = self.source = SimSession(source, self, is_source=True)
        source.sessions.append(end)
        ours, theirs = sink.driver._endpoint.hello, source.driver._endpoint.hello
        end.greeted(ours, theirs)
        self.sink.greeted(theirs, ours)

    def sever(self, keep: Callable[[int], int]) -> None:
        """The connection breaks: of each wire only a beginning still arrives.

        `keep` says how many messages of so many.
        """
        self.is_broken = True
        for end in self.ends:
            for _ in range(len(end.wire) - keep(len(end.wire))):
                end.wire.pop()


class SimSession:
    """One end, with what engine and link threads call."""

    def __init__(self, worker: SimWorker, pair: Pair, *, is_source: bool) -> None:
        self.worker = worker
        self.pair = pair
        self.is_source = is_source
        self.is_open = False
        self.is_lost = False
        self.wire: deque[SessionMessage] = deque()
        """What this end has sent and the other has not got."""
        self.lanes: tuple[Lane, ...] = ()
        self.desk = ReceiveDesk()
        # The engine may act between the look-up of a stream and the closing of its gate.
        self.desk._streams = _PreemptedLookUp(worker)
        self.links = SessionLinks(self, self.desk, worker.link_settings)

    # --- what engine and link threads call ---

    def send(self, message: SessionMessage) -> None:
        """See `Session`."""
        self.on_loop(self.enqueue, message)

    def close(self, reason: str) -> None:
        """See `Session`."""
        self.on_loop(self._close, reason)

    def open_link(self, generation: int, transport: str, queues: Sequence[SendQueue]) -> None:
        """See `Session`."""
        self.on_loop(self.links.open_senders, generation, transport, queues)

    def close_link(self, generation: int, reason: str) -> None:
        """See `Session`."""
        self.on_loop(self.links.close_generation, generation, reason)

    def on_loop(self, function: Callable[..., None], *args: object) -> None:
        """See `Session`."""
        self.worker.on_loop(function, *args)

    # --- loop thread ---

    def enqueue(self, message: SessionMessage) -> None:
        """See `Session`."""
        self.worker.world.properties.said(self, message)
        if not self.is_lost and not self.pair.is_broken:
            self.wire.append(message)

    def link_ended(self, generation: int, reason: str) -> None:
        """See `Session`."""
        self.enqueue(LinkDown(generation, reason))
        self.worker.post(LinkFailed(self, generation, reason))

    def greeted(self, peer: Hello, ours: Hello) -> None:
        """Both sides know one another."""
        source, sink = (ours, peer) if self.is_source else (peer, ours)
        self.lanes = lanes_between(source.ranks, sink.ranks, ours.heads)
        self.links.expect_lanes(len(self.lanes))
        self.is_open = True
        self.worker.post(SessionOpened(self, peer))

    def receive(self, message: SessionMessage) -> None:
        """The reading task has a message."""
        self.worker.post(MessageCame(self, message))
        if isinstance(message, LinkRendezvous | LinkSignal | LinkDown):
            try:
                self.links.on_message(message)
            except BadMessage as error:
                self._close(str(error))

    def lost(self, reason: str) -> None:
        """The stream has ended at this end."""
        if self.is_lost:
            return
        self.is_lost = True
        self.worker.sessions.remove(self)
        self.links.session_lost(f"session lost: {reason}")
        self.worker.post(SessionLost(self, reason))

    def _close(self, reason: str) -> None:
        if not self.is_lost:
            self.pair.sever(lambda length: length)
            self.lost(reason)


class _PreemptedLookUp(dict[int, "IncomingStream"]):
    def __init__(self, worker: SimWorker) -> None:
        super().__init__()
        self._worker = worker

    def get(self, number, default=None):
        stream = super().get(number, default)
        self._worker.world.preempt(self._worker)
        return stream
