"""Links of the simulator: each end makes one move when the simulator says so.

An end does with windows, queue and desk what a transport's thread does. Payloads lie in a pipe
between two moves; credits travel as signals of the session. A closed end may finish what its
thread had begun: one more move, then it reports its end.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kv_transfer.protocol.credits import ReceiveWindow, SendWindow
from kv_transfer.protocol.errors import BadMessage
from kv_transfer.protocol.messages import Signal
from tests.support.sim_violation import require

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kv_transfer.chunk_header import ChunkHeader
    from kv_transfer.incoming import ReceiveDesk
    from kv_transfer.links.interface import LinkChannel, ReceiverListener, SenderListener
    from kv_transfer.outgoing import OutgoingStream, SendQueue
    from tests.support.sim_session import SimSession
    from tests.support.sim_worker import SimWorker


class Pipe:
    """What is under way on one lane of one generation."""

    def __init__(self) -> None:
        self.payloads: deque[tuple[ChunkHeader, torch.Tensor]] = deque()
        self.repeated: set[int] = set()
        """Numbers of payloads that the source's engine never asked for."""
        self.sender: SimSender | None = None
        self.receiver: SimReceiver | None = None


class _End:
    """What both ends have: they are built, make moves, and end once."""

    def __init__(self, worker: SimWorker, session: SimSession, name: str, pipe: Pipe) -> None:
        self.worker = worker
        self.session = session
        self.name = f"{session.pair.name}/{name}"
        self.pipe = pipe
        self.is_built = False
        self.close_reason: str | None = None
        self.moves_left = 1
        """Once closed: what its thread may still do."""
        self.has_ended = False
        worker.link_ends.append(self)

    def close(self, reason: str) -> None:
        """See `LinkEnd.close`."""
        self.close_reason = self.close_reason or reason

    @property
    def may_move(self) -> bool:
        """Whether its thread still runs."""
        return not self.has_ended and (self.close_reason is None or self.moves_left > 0)

    def spend_move(self) -> None:
        """Whatever a closed end does, it is the last."""
        if self.close_reason is not None:
            self.moves_left = 0

    def end(self, reason: str) -> None:
        """Its thread ends. Reported once."""
        assert not self.has_ended
        self.has_ended = True
        self.worker.link_ends.remove(self)
        self.listener.failed(self.close_reason or reason)


class SimSender(_End):
    """The source's end."""

    def __init__(
        self,
        worker: SimWorker,
        session: SimSession,
        name: str,
        pipe: Pipe,
        queue: SendQueue,
        listener: SenderListener,
    ) -> None:
        super().__init__(worker, session, name, pipe)
        pipe.sender = self
        self.queue = queue
        self.listener = listener
        self.window = SendWindow(worker.world.setup.buffers)
        self.sent = 0
        next_piece = queue._next_piece

        def preempted():
            piece = next_piece()
            worker.world.preempt(worker)
            return piece

        # The engine may act between the choice of a piece and the closing of its gate.
        queue._next_piece = preempted

    def on_signal(self, signal: Signal, value: int) -> None:
        """Credit."""
        if signal is not Signal.CREDIT:
            raise BadMessage(f"signal {signal.value}")
        self.window.credit(value)

    @property
    def can_send(self) -> bool:
        """Whether a payload may leave now."""
        return self.is_built and self.may_move and self.window.credits > 0 and self.queue.has_work

    @property
    def can_move(self) -> bool:
        """Whether it can do its work."""
        return self.can_send

    def move(self) -> None:
        """Do it."""
        self.send()

    def build(self) -> None:
        """The connection exists here."""
        self.is_built = True
        self.listener.built()

    def send(self) -> None:
        """Gather one payload into the pipe."""
        self.spend_move()
        out = torch.empty(self.queue.buffer_bytes, dtype=torch.uint8)
        header = self.queue.next_chunk(self.window.next_seq, out)
        if header is None:
            return
        self.window.take()
        payload = out[: header.payload_bytes]
        self.worker.world.properties.gathered(self.worker, self.session, header, payload, self.lane)
        self.pipe.payloads.append((header, payload))
        if self.window.credits > 0 and self.worker.world.chance("repeat payload"):
            # A source with a bug: the same cells again, under the next number.
            self.worker.world.is_anything_wild = True
            again = replace(header, seq=self.window.take())
            self.pipe.repeated.add(again.seq)
            self.pipe.payloads.append((again, payload))
        if self.worker.world.setup.sent_early:
            self.report_sent(header)

    def report_sent(self, header: ChunkHeader) -> None:
        """A payload has left its buffer."""
        if not self.has_ended and header.seq not in self.pipe.repeated:
            self.listener.sent(header)

    @property
    def lane(self) -> int:
        """Which lane of its session this is."""
        return int(self.name.rpartition("-")[2])

    def queued_streams(self) -> Iterable[OutgoingStream]:
        """Streams with pieces that wait."""
        return self.queue._turns


class SimReceiver(_End):
    """The sink's end."""

    def __init__(
        self,
        worker: SimWorker,
        session: SimSession,
        name: str,
        pipe: Pipe,
        lane: int,
        desk: ReceiveDesk,
        listener: ReceiverListener,
        channel: LinkChannel,
    ) -> None:
        super().__init__(worker, session, name, pipe)
        pipe.receiver = self
        self.lane = lane
        self.desk = desk
        self.listener = listener
        self.channel = channel
        self.window = ReceiveWindow()

    def on_signal(self, signal: Signal, value: int) -> None:
        """None comes this way."""
        raise BadMessage(f"signal {signal.value} {value} at a receiver")

    @property
    def can_take(self) -> bool:
        """Whether a payload is here."""
        return self.is_built and self.may_move and bool(self.pipe.payloads)

    @property
    def can_move(self) -> bool:
        """Whether it can do its work."""
        return self.can_take

    def move(self) -> None:
        """Do it."""
        self.take()

    def build(self) -> None:
        """The connection exists here, and every buffer is credit."""
        self.is_built = True
        self._grant(self.worker.world.setup.buffers)
        self.listener.built()

    def take(self) -> None:
        """Give the payload that came to the desk."""
        self.spend_move()
        header, payload = self.pipe.payloads.popleft()
        try:
            self.window.take(header.seq)
        except BadMessage as error:
            world = self.worker.world
            require(world.is_anything_wild, f"P8: the windows of a link differ: {error}")
            self.end(str(error))
            return
        if self.pipe.sender is not None and not self.worker.world.setup.sent_early:
            self.pipe.sender.report_sent(header)
        taken = self.desk.take(self.lane, header, payload)
        self.worker.world.properties.took(self.worker, self.session, taken, self.lane)
        self.listener.took(taken)
        if self.close_reason is None:
            self._grant(1)

    def queued_streams(self) -> Iterable[OutgoingStream]:
        """None: it only receives."""
        return ()

    def _grant(self, buffers: int) -> None:
        self.window.grant(buffers)
        self.channel.signal(Signal.CREDIT, buffers)


class SimLinkFactory:
    """Makes the ends of a worker's links."""

    def __init__(self, worker: SimWorker) -> None:
        self._worker = worker

    def open_sender(
        self, name: str, channel: LinkChannel, queue: SendQueue, listener: SenderListener
    ) -> SimSender:
        """See `LinkFactory`."""
        session = channel._session
        return SimSender(self._worker, session, name, session.pair.pipe(name), queue, listener)

    def open_receiver(
        self,
        name: str,
        channel: LinkChannel,
        lane: int,
        desk: ReceiveDesk,
        listener: ReceiverListener,
    ) -> SimReceiver:
        """See `LinkFactory`."""
        session = channel._session
        pipe = session.pair.pipe(name)
        return SimReceiver(self._worker, session, name, pipe, lane, desk, listener, channel)
