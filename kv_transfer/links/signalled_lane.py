"""Lanes over groups whose waits nothing can wake: the ends wake one another through the session.

The thread of an end rests in its inbox, where a signal, work or `close` wakes it. It waits in the
group only for what is certain to come: the source for payloads that it sent with credit, the sink
from the source's signal until a header says `is_last`. The source keeps one payload gathered
ahead, and promises another one in a header only when it has it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from kv_transfer.links.lane_thread import LaneThread
from kv_transfer.protocol.credits import ReceiveWindow, SendWindow
from kv_transfer.protocol.errors import BadMessage
from kv_transfer.protocol.messages import Signal
from kvferry.clock import MonotonicClock

if TYPE_CHECKING:
    import torch

    from kv_transfer.chunk_header import ChunkHeader
    from kv_transfer.incoming import ReceiveDesk
    from kv_transfer.links.interface import LinkChannel, ReceiverListener, SenderListener
    from kv_transfer.links.staging import StagingRing
    from kv_transfer.outgoing import SendQueue


class Port(Protocol):
    """One end of a group. All calls are on the lane's thread, but for `interrupt`."""

    def connect(self) -> None:
        """Build this end; waits until the peer builds its own."""
        ...

    def interrupt(self) -> None:
        """End a wait in the group if the transport can. Once, from any thread."""
        ...

    def drop(self) -> None:
        """Let go of the group, whatever exists of it. Once, last."""
        ...


class SendPort(Port, Protocol):
    """The source's end of a group."""

    def send_payload(self, buffer: int, payload: torch.Tensor, seq: int) -> None:
        """Begin to send `payload` (uint8), which lies in that buffer of the ring."""
        ...

    def send_header(self, header: ChunkHeader) -> None:
        """Begin to send the header of the payload that is being sent."""
        ...

    def await_sent(self) -> tuple[int, ChunkHeader]:
        """Wait until the oldest payload has left; its buffer and header."""
        ...


class ReceivePort(Port, Protocol):
    """The sink's end of a group."""

    def make_ready(self, buffer: int, memory: torch.Tensor, seq: int) -> None:
        """Let that payload come into that buffer (uint8 [buffer_bytes]); any size fits."""
        ...

    def await_payload(self) -> tuple[int, ChunkHeader]:
        """Wait for the payload that is next; its buffer and header."""
        ...


class _Order(Enum):
    """What makes a thread look around."""

    WORK = "work"
    CLOSE = "close"


@dataclass(frozen=True, slots=True)
class _Told:
    """The other end says so."""

    signal: Signal
    value: int


PortT = TypeVar("PortT", bound=Port)


class _SignalledEnd(LaneThread, Generic[PortT]):
    """What both ends share: the group, the inbox and the ring."""

    def __init__(
        self,
        port: PortT,
        channel: LinkChannel,
        listener: SenderListener | ReceiverListener,
        ring: StagingRing,
        timeout_s: float,
    ) -> None:
        super().__init__(channel, listener)
        self._port = port
        self._ring = ring
        self._timeout_s = timeout_s
        self._inbox: SimpleQueue[_Order | _Told] = SimpleQueue()

    def on_signal(self, signal: Signal, value: int) -> None:
        """See `LinkEnd.on_signal`."""
        self._inbox.put(_Told(signal, value))

    def _wake(self) -> None:
        self._inbox.put(_Order.CLOSE)
        self._port.interrupt()

    def _drop(self) -> None:
        self._port.drop()


@dataclass(frozen=True, slots=True)
class _Gathered:
    header: ChunkHeader
    buffer: int


class SignalledSender(_SignalledEnd[SendPort]):
    """The source's end."""

    def __init__(
        self,
        port: SendPort,
        channel: LinkChannel,
        queue: SendQueue,
        listener: SenderListener,
        ring: StagingRing,
        timeout_s: float,
    ) -> None:
        super().__init__(port, channel, listener, ring, timeout_s)
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
        self._in_flight = 0

    def _serve(self) -> None:
        # The queue may outlive this end: it gets hold of the inbox only.
        inbox = self._inbox
        self._queue.on_work = lambda: inbox.put(_Order.WORK)
        self._port.connect()
        self._listener.built()
        while True:
            self._take_orders()
            if self._has_credit and self._gather_ahead():
                self._send()
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
        until_s = self._clock.now() + self._timeout_s
        while not self._has_credit:
            try:
                self._obey(self._inbox.get(timeout=max(0.0, until_s - self._clock.now())))
            except Empty:
                reason = f"the sink has given no credit for {self._timeout_s:g} s"
                raise TimeoutError(reason) from None

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

    def _send(self) -> None:
        """Send what is gathered; while it is under way, gather what its header promises."""
        assert self._ahead is not None
        assert self._window is not None
        header, buffer = self._ahead.header, self._ahead.buffer
        self._ahead = None
        seq = self._window.take()
        assert seq == header.seq, f"payload {header.seq} sent as {seq}"
        payload = self._ring.buffer(buffer)[: header.payload_bytes]
        self._port.send_payload(buffer, payload, seq)
        if not self._is_awaited:
            self._channel.signal(Signal.SENDING, seq)
        if self._ring.free == 0 and self._in_flight:
            self._complete_oldest()
        self._is_awaited = self._gather_ahead()
        self._port.send_header(replace(header, is_last=not self._is_awaited))
        self._in_flight += 1

    def _complete_oldest(self) -> None:
        buffer, header = self._port.await_sent()
        self._in_flight -= 1
        self._ring.give_back(buffer)
        self._listener.sent(header)


class SignalledReceiver(_SignalledEnd[ReceivePort]):
    """The sink's end."""

    def __init__(
        self,
        port: ReceivePort,
        channel: LinkChannel,
        target: tuple[int, ReceiveDesk],
        listener: ReceiverListener,
        ring: StagingRing,
        timeout_s: float,
    ) -> None:
        """`target`: the lane and who takes its payloads."""
        super().__init__(port, channel, listener, ring, timeout_s)
        self._lane, self._desk = target
        self._listener = listener
        self._window = ReceiveWindow()
        self._untold = 0
        """Buffers that are ready and that the source has no credit for yet."""

    def _serve(self) -> None:
        self._port.connect()
        while self._ring.free:
            self._post()
        self._listener.built()
        self._tell_credit()
        while True:
            order = self._inbox.get()
            self._check_open()
            match order:
                case _Told(Signal.SENDING, seq):
                    if seq != self._window.next_seq:
                        raise BadMessage(f"payload {seq} where {self._window.next_seq} is next")
                    self._receive_all()
                case _Told(signal, _):
                    raise BadMessage(f"signal {signal.value} from a source")
                case _Order():
                    pass

    def _post(self) -> None:
        buffer = self._ring.take()
        self._port.make_ready(buffer, self._ring.buffer(buffer), self._window.granted)
        self._window.grant(1)
        self._untold += 1

    def _tell_credit(self) -> None:
        self._channel.signal(Signal.CREDIT, self._untold)
        self._untold = 0

    def _receive_all(self) -> None:
        """Take payloads until the source says that it has no other one yet."""
        is_last = False
        while not is_last:
            self._check_open()
            is_last = self._receive()
            # In halves of the ring: few messages, and the source has always some credit.
            if self._untold >= max(1, len(self._ring) // 2):
                self._tell_credit()

    def _receive(self) -> bool:
        buffer, header = self._port.await_payload()
        self._window.take(header.seq)
        payload = self._ring.buffer(buffer)[: header.payload_bytes]
        if payload.numel() != header.payload_bytes:
            raise BadMessage(f"payload {header.seq} of {header.payload_bytes} bytes")
        self._listener.took(self._desk.take(self._lane, header, payload))
        self._ring.give_back(buffer)
        self._post()
        return header.is_last
