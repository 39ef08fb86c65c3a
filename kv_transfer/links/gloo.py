"""A link over `torch.distributed` Gloo: one two-rank group per lane and generation.

After each payload goes a *trailer* under its own tag, the payload's header, and both ends wait on
the trailer alone: when the peer dies in the middle of a payload, the payload's operation hangs
until its timeout, but the trailer's fails at once. A trailer that arrives means that the payload
before it is there.

Nothing wakes a thread that waits in Gloo, and a wait that expires closes the pair. So the sink's
thread waits there only while payloads are on their way: from the source's signal until a header
says `is_last`. The source keeps one payload gathered ahead, and promises another one in a header
only when it has it.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.distributed import ProcessGroupGloo

from kv_transfer.chunk_header import HEADER_BYTES, unpack_header
from kv_transfer.links.lane_thread import LaneThread
from kv_transfer.links.staging import StagingRing
from kv_transfer.protocol.credits import ReceiveWindow, SendWindow
from kv_transfer.protocol.errors import BadMessage
from kv_transfer.protocol.messages import Signal
from kvferry.clock import MonotonicClock

if TYPE_CHECKING:
    from kv_transfer.chunk_header import ChunkHeader
    from kv_transfer.incoming import ReceiveDesk
    from kv_transfer.links.interface import LinkChannel, ReceiverListener, SenderListener
    from kv_transfer.links.rendezvous import RendezvousStore
    from kv_transfer.outgoing import SendQueue

_LOG = logging.getLogger(__name__)

SOURCE_RANK, SINK_RANK = 0, 1

_TAG_WRAP = 2**29
"""Tags are 31-bit; two per payload. No ring is long enough for a tag to be in use twice."""

_REAP = timedelta(milliseconds=1)
"""A payload whose trailer failed will not complete; waiting on it frees its buffer."""

_THERE = timedelta(seconds=1)
"""A payload whose trailer arrived is complete; the wait only collects it."""

Work: TypeAlias = Any
Group: TypeAlias = Any
"""Torch's stubs of `Work` and `ProcessGroupGloo` lack the methods used here."""

_Gloo: Any = ProcessGroupGloo


class GlooLinkFactory:
    """Links of one worker, bound to one local address."""

    def __init__(self, host: str, timeout_s: float, buffers: int, buffer_bytes: int) -> None:
        self._host = host
        self.timeout_s = timeout_s
        self.buffers = buffers
        self.buffer_bytes = buffer_bytes

    def open_sender(
        self, name: str, channel: LinkChannel, queue: SendQueue, listener: SenderListener
    ) -> GlooSender:
        """See `LinkFactory.open_sender`."""
        ring = StagingRing(self.buffers, self.buffer_bytes)
        sender = GlooSender(self, channel, queue, listener, ring)
        sender.start(name)
        return sender

    def open_receiver(
        self,
        name: str,
        channel: LinkChannel,
        lane: int,
        desk: ReceiveDesk,
        listener: ReceiverListener,
    ) -> GlooReceiver:
        """See `LinkFactory.open_receiver`."""
        ring = StagingRing(self.buffers, self.buffer_bytes)
        receiver = GlooReceiver(self, channel, (lane, desk), listener, ring)
        receiver.start(name)
        return receiver

    def connect(self, store: RendezvousStore, rank: int) -> Group:
        """Build the two-rank group; blocks until the peer builds its end."""
        options = _Gloo._Options()
        options._devices = [_Gloo.create_device(hostname=self._host)]
        options._timeout = timedelta(seconds=self.timeout_s)
        # One thread per group: more of them only wake one another on a busy core.
        options._threads = 1
        return _Gloo(store, rank, 2, options)


class _Order(Enum):
    """What makes a thread look around."""

    WORK = "work"
    CLOSE = "close"


@dataclass(frozen=True, slots=True)
class _Told:
    """The other end says so."""

    signal: Signal
    value: int


@dataclass(frozen=True, slots=True, eq=False)
class _InFlight:
    """A payload and its trailer in Gloo's hands. The tensors must outlive the operations."""

    buffer: int
    payload: torch.Tensor
    trailer: torch.Tensor
    payload_work: Work
    trailer_work: Work


def tags_of(seq: int) -> tuple[int, int]:
    """Under which a payload and its trailer travel."""
    base = 2 * (seq % _TAG_WRAP)
    return base, base + 1


def trailer_of(header: ChunkHeader) -> torch.Tensor:
    """uint8 [HEADER_BYTES]."""
    return torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8)


class _GlooEnd(LaneThread):
    """What both ends share: the inbox, the ring, and waiting for a payload."""

    def __init__(
        self,
        factory: GlooLinkFactory,
        channel: LinkChannel,
        listener: SenderListener | ReceiverListener,
        ring: StagingRing,
    ) -> None:
        super().__init__(channel, listener)
        self._factory = factory
        self._ring = ring
        self._in_flight: deque[_InFlight] = deque()
        self._inbox: SimpleQueue[_Order | _Told] = SimpleQueue()

    def on_signal(self, signal: Signal, value: int) -> None:
        """See `LinkEnd.on_signal`."""
        self._inbox.put(_Told(signal, value))

    def _wake(self) -> None:
        self._inbox.put(_Order.CLOSE)

    def _drop(self) -> None:
        # Operations keep the group alive, and the group its threads and connection.
        self._in_flight.clear()

    def _await_oldest(self) -> tuple[_InFlight, ChunkHeader]:
        """Wait until the oldest payload has passed, through its trailer."""
        flight = self._in_flight[0]
        try:
            flight.trailer_work.wait(timedelta(seconds=self._factory.timeout_s))
        except RuntimeError:
            try:
                flight.payload_work.wait(_REAP)
            except RuntimeError:
                _LOG.debug("reaped a hung payload")
            raise
        flight.payload_work.wait(_THERE)
        return self._in_flight.popleft(), unpack_header(flight.trailer.numpy().tobytes())


@dataclass(frozen=True, slots=True)
class _Gathered:
    header: ChunkHeader
    buffer: int


class GlooSender(_GlooEnd):
    """The source's end."""

    def __init__(
        self,
        factory: GlooLinkFactory,
        channel: LinkChannel,
        queue: SendQueue,
        listener: SenderListener,
        ring: StagingRing,
    ) -> None:
        super().__init__(factory, channel, listener, ring)
        self._queue = queue
        self._listener = listener
        self._clock = MonotonicClock()
        self._window: SendWindow | None = None
        """None until the first credit, which tells how many buffers the sink has."""
        self._ahead: _Gathered | None = None
        self._next_seq = 0
        """Of the next payload to be gathered."""
        self._is_awaited = False
        """Whether the sink has been promised another payload and waits for it."""

    def _serve(self) -> None:
        # The queue may outlive this end: it gets hold of the inbox only.
        inbox = self._inbox
        self._queue.on_work = lambda: inbox.put(_Order.WORK)
        group = self._factory.connect(self._channel.store, SOURCE_RANK)
        self._listener.built()
        while True:
            self._take_orders()
            if self._has_credit and self._gather_ahead():
                self._send(group)
            elif self._in_flight:
                self._complete_oldest()

    @property
    def _has_credit(self) -> bool:
        return self._window is not None and self._window.credits > 0

    @property
    def _has_work(self) -> bool:
        return self._ahead is not None or self._queue.has_work

    def _take_orders(self) -> None:
        """Read the inbox; wait for it if there is nothing else to do."""
        if not self._in_flight:
            if not self._has_work:
                self._obey(self._inbox.get())
            elif not self._has_credit:
                self._await_credit()
        while not self._inbox.empty():
            self._obey(self._inbox.get())

    def _await_credit(self) -> None:
        limit_s = self._factory.timeout_s
        until_s = self._clock.now() + limit_s
        while not self._has_credit:
            try:
                self._obey(self._inbox.get(timeout=max(0.0, until_s - self._clock.now())))
            except Empty:
                raise TimeoutError(f"the sink has given no credit for {limit_s:g} s") from None

    def _obey(self, order: _Order | _Told) -> None:
        self._check_open()
        match order:
            case _Told(Signal.CREDIT, buffers):
                if self._window is None:
                    self._window = SendWindow(buffers)
                self._window.credit(buffers)
            case _Told(signal, _):
                raise BadMessage(f"signal {signal.value} from a sink")
            case _Order():
                pass

    def _gather_ahead(self) -> bool:
        """Gather a payload if none is, there is one, and there is a buffer; whether one is."""
        if self._ahead is None and self._ring.free and self._queue.has_work:
            buffer = self._ring.take()
            header = self._queue.next_chunk(self._next_seq, self._ring.buffer(buffer))
            if header is None:
                self._ring.give_back(buffer)
            else:
                self._next_seq += 1
                self._ahead = _Gathered(header, buffer)
        return self._ahead is not None

    def _send(self, group: Group) -> None:
        """Send what is gathered; while it is under way, gather what its header promises."""
        assert self._ahead is not None
        assert self._window is not None
        header, buffer = self._ahead.header, self._ahead.buffer
        self._ahead = None
        seq = self._window.take()
        assert seq == header.seq, f"payload {header.seq} sent as {seq}"
        payload_tag, trailer_tag = tags_of(seq)
        payload = self._ring.buffer(buffer)[: header.payload_bytes]
        payload_work = group.send([payload], SINK_RANK, payload_tag)
        if not self._is_awaited:
            self._channel.signal(Signal.SENDING, seq)
        if self._ring.free == 0 and self._in_flight:
            self._complete_oldest()
        self._is_awaited = self._gather_ahead()
        trailer = trailer_of(replace(header, is_last=not self._is_awaited))
        trailer_work = group.send([trailer], SINK_RANK, trailer_tag)
        self._in_flight.append(_InFlight(buffer, payload, trailer, payload_work, trailer_work))

    def _complete_oldest(self) -> None:
        flight, header = self._await_oldest()
        self._ring.give_back(flight.buffer)
        self._listener.sent(header)


class GlooReceiver(_GlooEnd):
    """The sink's end: a receive is posted into every free buffer."""

    def __init__(
        self,
        factory: GlooLinkFactory,
        channel: LinkChannel,
        target: tuple[int, ReceiveDesk],
        listener: ReceiverListener,
        ring: StagingRing,
    ) -> None:
        """`target`: the lane and who takes its payloads."""
        super().__init__(factory, channel, listener, ring)
        self._lane, self._desk = target
        self._listener = listener
        self._window = ReceiveWindow()
        self._untold = 0
        """Receives posted that the source has no credit for yet."""

    def _serve(self) -> None:
        group = self._factory.connect(self._channel.store, SINK_RANK)
        for _ in range(len(self._ring)):
            self._post(group)
        self._listener.built()
        self._tell_credit()
        while True:
            order = self._inbox.get()
            self._check_open()
            match order:
                case _Told(Signal.SENDING, seq):
                    if seq != self._window.next_seq:
                        raise BadMessage(f"payload {seq} where {self._window.next_seq} is next")
                    self._receive_all(group)
                case _Told(signal, _):
                    raise BadMessage(f"signal {signal.value} from a source")
                case _Order():
                    pass

    def _post(self, group: Group) -> None:
        """Post the next receive in sequence; any payload fits, for buffers are full size."""
        buffer = self._ring.take()
        payload_tag, trailer_tag = tags_of(self._window.granted)
        payload = self._ring.buffer(buffer)
        trailer = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
        flight = _InFlight(
            buffer,
            payload,
            trailer,
            group.recv([payload], SOURCE_RANK, payload_tag),
            group.recv([trailer], SOURCE_RANK, trailer_tag),
        )
        self._in_flight.append(flight)
        self._window.grant(1)
        self._untold += 1

    def _tell_credit(self) -> None:
        self._channel.signal(Signal.CREDIT, self._untold)
        self._untold = 0

    def _receive_all(self, group: Group) -> None:
        """Take payloads until the source says that it has no other one yet."""
        is_last = False
        while not is_last:
            self._check_open()
            is_last = self._receive(group)
            # In halves of the ring: few messages, and the source has always some credit.
            if self._untold >= max(1, len(self._ring) // 2):
                self._tell_credit()

    def _receive(self, group: Group) -> bool:
        flight, header = self._await_oldest()
        self._window.take(header.seq)
        if header.payload_bytes > flight.payload.numel():
            raise BadMessage(f"payload {header.seq} of {header.payload_bytes} bytes")
        payload = flight.payload[: header.payload_bytes]
        self._listener.took(self._desk.take(self._lane, header, payload))
        self._ring.give_back(flight.buffer)
        self._post(group)
        return header.is_last
