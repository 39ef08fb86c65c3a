"""A link inside one process, under the same contract as the real ones. For tests.

The source gathers straight into the sink's buffers; headers and credits are queue entries.
"""

from __future__ import annotations

import itertools
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from kv_transfer.chunk_header import unpack_header
from kv_transfer.links.lane_thread import LaneThread
from kv_transfer.links.staging import StagingRing
from kv_transfer.protocol.credits import ReceiveWindow, SendWindow
from kv_transfer.protocol.errors import BadMessage

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from kv_transfer.chunk_header import ChunkHeader
    from kv_transfer.incoming import ReceiveDesk
    from kv_transfer.links.interface import LinkChannel, ReceiverListener, SenderListener
    from kv_transfer.outgoing import SendQueue
    from kv_transfer.protocol.messages import Signal

_CLOSE, _WORK = "close", "work"


class MemoryLinkFactory:
    """Both ends must come from the same factory."""

    def __init__(self, timeout_s: float, buffers: int, buffer_bytes: int) -> None:
        self.timeout_s = timeout_s
        self.buffers = buffers
        self.buffer_bytes = buffer_bytes
        self.receivers: dict[str, MemoryReceiver] = {}
        self.names = itertools.count()

    def open_sender(
        self, name: str, channel: LinkChannel, queue: SendQueue, listener: SenderListener
    ) -> MemorySender:
        sender = MemorySender(self, channel, queue, listener)
        sender.start(name)
        return sender

    def open_receiver(
        self,
        name: str,
        channel: LinkChannel,
        lane: int,
        desk: ReceiveDesk,
        listener: ReceiverListener,
    ) -> MemoryReceiver:
        receiver = MemoryReceiver(self, channel, lane, desk, listener)
        receiver.start(name)
        return receiver


class _MemoryEnd(LaneThread):
    def __init__(
        self, channel: LinkChannel, listener: SenderListener | ReceiverListener, timeout_s: float
    ) -> None:
        super().__init__(channel, listener)
        self.inbox: SimpleQueue[object] = SimpleQueue()
        self.peer_left: Callable[[], None] = lambda: None
        """Tells the other end."""
        self._timeout_s = timeout_s

    def on_signal(self, signal: Signal, value: int) -> None:
        self.inbox.put(BadMessage(f"signal {signal.value} {value} on a link without signals"))

    def _wake(self) -> None:
        self.inbox.put(_CLOSE)

    def _drop(self) -> None:
        self.peer_left()

    def _next(self, timeout_s: float | None) -> object:
        try:
            order = self.inbox.get(timeout=timeout_s)
        except Empty:
            raise TimeoutError(f"nothing from the peer for {timeout_s:g} s") from None
        self._check_open()
        if isinstance(order, Exception):
            raise order
        return order


class MemorySender(_MemoryEnd):
    """The source's end. Takes credits, each the number of a buffer."""

    def __init__(
        self,
        factory: MemoryLinkFactory,
        channel: LinkChannel,
        queue: SendQueue,
        listener: SenderListener,
    ) -> None:
        super().__init__(channel, listener, factory.timeout_s)
        self._factory = factory
        self._queue = queue
        self._listener = listener

    def _serve(self) -> None:
        inbox = self.inbox
        self._queue.on_work = lambda: inbox.put(_WORK)
        peer = self._factory.receivers[self._channel.store.get("receiver").decode()]
        peer.attach(self)
        self.peer_left = lambda: peer.inbox.put(ConnectionError("the peer has left"))
        self._listener.built()
        window, free = SendWindow(len(peer.ring)), list(range(len(peer.ring)))
        window.credit(len(free))
        while True:
            while window.credits and self._queue.has_work:
                self._check_open()
                header = self._queue.next_chunk(window.next_seq, peer.ring.buffer(free[-1]))
                if header is not None:
                    window.take()
                    peer.inbox.put((header.pack(), free.pop()))
                    self._listener.sent(header)
            is_idle = len(free) == len(peer.ring)
            order = self._next(None if is_idle else self._timeout_s)
            if isinstance(order, int):
                window.credit(1)
                free.append(order)


class MemoryReceiver(_MemoryEnd):
    """The sink's end. Takes headers, each with the number of the buffer that is full."""

    def __init__(
        self,
        factory: MemoryLinkFactory,
        channel: LinkChannel,
        lane: int,
        desk: ReceiveDesk,
        listener: ReceiverListener,
    ) -> None:
        super().__init__(channel, listener, factory.timeout_s)
        self.ring = StagingRing(factory.buffers, factory.buffer_bytes)
        self._factory = factory
        self._lane = lane
        self._desk = desk
        self._listener = listener
        self._give_credit: Callable[[int], None] = lambda buffer: None

    def attach(self, sender: MemorySender) -> None:
        """The sender has found this end."""
        self._give_credit = sender.inbox.put
        self.peer_left = lambda: sender.inbox.put(ConnectionError("the peer has left"))

    def _serve(self) -> None:
        window = ReceiveWindow()
        for _ in range(len(self.ring)):
            self.ring.take()
        window.grant(len(self.ring))
        name = f"memory-{next(self._factory.names)}"
        self._factory.receivers[name] = self
        self._channel.store.set("receiver", name)
        self._listener.built()
        while True:
            order = self._next(None)
            assert isinstance(order, tuple)
            raw, buffer = order
            header = unpack_header(raw)
            window.take(header.seq)
            payload = self._payload(header, buffer)
            self._listener.took(self._desk.take(self._lane, header, payload))
            window.grant(1)
            self._give_credit(buffer)

    def _payload(self, header: ChunkHeader, buffer: int) -> torch.Tensor:
        if header.payload_bytes > self.ring.buffer_bytes:
            raise BadMessage(f"payload {header.seq} of {header.payload_bytes} bytes")
        return self.ring.buffer(buffer)[: header.payload_bytes]
