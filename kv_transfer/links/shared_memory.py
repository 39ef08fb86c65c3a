"""A link between two processes of one host: staging buffers that both of them map.

The source gathers straight into a buffer of the sink and sends the payload's header with the
buffer's number over a Unix connection; the sink scatters straight from the buffer and sends the
number back as credit. The death of either process ends the connection, hence the link, at once.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from contextlib import ExitStack
from typing import TYPE_CHECKING

from kv_transfer.chunk_header import HEADER_BYTES, unpack_header
from kv_transfer.links.doorbell import Doorbell
from kv_transfer.links.lane_thread import LaneThread
from kv_transfer.links.shared_ring import SharedRing, new_ring_memory
from kv_transfer.links.unix_stream import RecordStream, accept, dial, is_same_user, listen
from kv_transfer.protocol.credits import ReceiveWindow, SendWindow
from kv_transfer.protocol.errors import BadMessage
from kvferry.clock import MonotonicClock

if TYPE_CHECKING:
    from kv_transfer.incoming import ReceiveDesk
    from kv_transfer.links.interface import LinkChannel, ReceiverListener, SenderListener
    from kv_transfer.outgoing import SendQueue
    from kv_transfer.protocol.messages import Signal

ADDRESS_KEY = "unix"
"""Of the store's entry with the sink's address."""

GEOMETRY = struct.Struct("<QQ")
"""First message of the sink, with the ring's descriptor: how many buffers, of how many bytes."""

BUFFER = struct.Struct("<Q")
"""A buffer's number: after each header, and as a credit."""


class SharedMemoryLinkFactory:
    """Links of one worker with others on its host."""

    def __init__(self, timeout_s: float, buffers: int, buffer_bytes: int) -> None:
        self.timeout_s = timeout_s
        self.buffers = buffers
        self.buffer_bytes = buffer_bytes

    def open_sender(
        self, name: str, channel: LinkChannel, queue: SendQueue, listener: SenderListener
    ) -> SharedMemorySender:
        """See `LinkFactory.open_sender`."""
        sender = SharedMemorySender(self, channel, queue, listener)
        sender.start(name)
        return sender

    def open_receiver(
        self,
        name: str,
        channel: LinkChannel,
        lane: int,
        desk: ReceiveDesk,
        listener: ReceiverListener,
    ) -> SharedMemoryReceiver:
        """See `LinkFactory.open_receiver`."""
        receiver = SharedMemoryReceiver(self, channel, (lane, desk), listener)
        receiver.start(name)
        return receiver


class _SharedMemoryEnd(LaneThread):
    """What both ends share: the connection, and how `close` ends a wait for it."""

    def __init__(
        self,
        factory: SharedMemoryLinkFactory,
        channel: LinkChannel,
        listener: SenderListener | ReceiverListener,
    ) -> None:
        super().__init__(channel, listener)
        self._factory = factory
        self._socket: socket.socket | None = None
        """Under the lock, so that nobody shuts down a descriptor that has another use by now."""
        self._held = ExitStack()
        """What is let go of when the end ends."""

    def on_signal(self, signal: Signal, value: int) -> None:
        """See `LinkEnd.on_signal`."""
        self.close(f"signal {signal.value} of {value} on a link that has none")

    def _hold(self, new: socket.socket) -> None:
        """Let `close` shut it down from now on, in place of the one before."""
        with self._lock:
            before, self._socket = self._socket, new
        if before is not None:
            before.close()
        self._check_open()

    def _wake(self) -> None:
        with self._lock:
            if self._socket is not None:
                try:
                    self._socket.shutdown(socket.SHUT_RDWR)
                except OSError:
                    return  # The peer was faster: nothing is there to wait for any more.

    def _drop(self) -> None:
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None
        self._held.close()


class SharedMemorySender(_SharedMemoryEnd):
    """The source's end."""

    def __init__(
        self,
        factory: SharedMemoryLinkFactory,
        channel: LinkChannel,
        queue: SendQueue,
        listener: SenderListener,
    ) -> None:
        super().__init__(factory, channel, listener)
        self._queue = queue
        self._listener = listener
        self._doorbell = Doorbell()
        self._held.callback(self._doorbell.close)
        self._clock = MonotonicClock()
        self._free: list[int] = []
        """Buffers to gather into; the one that came back last is taken first: it is in cache."""
        self._moved_at_s = 0.0
        """When the sink gave credit, or got the first payload that it owes credit for."""

    def _serve(self) -> None:
        self._queue.on_work = self._doorbell.ring
        connection = self._dial()
        self._ring = _receive_ring(connection)
        self._held.callback(self._ring.close)
        if self._ring.buffer_bytes < self._queue.buffer_bytes:
            raise BadMessage(f"buffers of {self._ring.buffer_bytes} bytes")
        self._stream = RecordStream(connection, BUFFER.size, self._factory.timeout_s)
        self._free = list(range(len(self._ring)))
        self._window = SendWindow(len(self._ring))
        self._window.credit(len(self._ring))
        self._listener.built()
        news = select.poll()
        news.register(connection, select.POLLIN)
        news.register(self._doorbell, select.POLLIN)
        while True:
            self._check_open()
            self._take_credits()
            if self._free and self._queue.has_work:
                self._send()
            else:
                self._wait(news)

    def _dial(self) -> socket.socket:
        address = self._channel.store.get(ADDRESS_KEY).decode(errors="replace")
        connection = dial(address, self._factory.timeout_s)
        self._hold(connection)
        if not is_same_user(connection):
            raise ConnectionError("the sink is another user's")
        return connection

    def _take_credits(self) -> None:
        for record in self._stream.receive(block=False):
            (buffer,) = BUFFER.unpack(record)
            if buffer >= len(self._ring) or buffer in self._free:
                raise BadMessage(f"credit for buffer {buffer}, which is not the sink's")
            self._window.credit(1)
            self._free.append(buffer)
            self._moved_at_s = self._clock.now()

    def _send(self) -> None:
        buffer = self._free[-1]
        header = self._queue.next_chunk(self._window.next_seq, self._ring.buffer(buffer))
        if header is None:
            return
        if len(self._free) == len(self._ring):
            self._moved_at_s = self._clock.now()
        self._window.take()
        self._free.pop()
        self._stream.send(header.pack() + BUFFER.pack(buffer))
        self._listener.sent(header)

    def _wait(self, news: select.poll) -> None:
        """For work or credit. The sink has a limit to give credit, work may never come."""
        limit_ms: float | None = None
        if len(self._free) < len(self._ring):
            left_s = self._moved_at_s + self._factory.timeout_s - self._clock.now()
            limit_ms = max(0.0, left_s) * 1000
        events = dict(news.poll(limit_ms))
        if not events:
            raise TimeoutError(f"the sink has taken no payload for {self._factory.timeout_s:g} s")
        if self._doorbell.fileno() in events:
            self._doorbell.answer()


class SharedMemoryReceiver(_SharedMemoryEnd):
    """The sink's end, which owns the ring."""

    def __init__(
        self,
        factory: SharedMemoryLinkFactory,
        channel: LinkChannel,
        target: tuple[int, ReceiveDesk],
        listener: ReceiverListener,
    ) -> None:
        """`target`: the lane and who takes its payloads."""
        super().__init__(factory, channel, listener)
        self._lane, self._desk = target
        self._listener = listener
        self._window = ReceiveWindow()
        self._emptied: list[int] = []
        """Buffers that the source does not know yet to be free."""
        self._granted: set[int] = set()
        """Buffers that the source may fill."""

    def _serve(self) -> None:
        connection = self._open_ring()
        self._stream = RecordStream(connection, HEADER_BYTES + BUFFER.size, self._factory.timeout_s)
        self._granted = set(range(len(self._ring)))
        self._window.grant(len(self._ring))
        self._listener.built()
        while True:
            frames = self._stream.receive(block=False)
            if not frames:
                self._give_credit()
                frames = self._stream.receive(block=True)
            for frame in frames:
                self._check_open()
                self._take(frame)
                # While payloads wait credit goes in halves of the ring: few messages, and the
                # source does not run dry.
                if len(self._emptied) >= max(1, len(self._ring) // 2):
                    self._give_credit()

    def _open_ring(self) -> socket.socket:
        """Make the ring and hand it to the first of our user's processes that connects."""
        listener, address = listen(self._factory.timeout_s)
        self._hold(listener)
        self._channel.store.set(ADDRESS_KEY, address)
        count, buffer_bytes = self._factory.buffers, self._factory.buffer_bytes
        memory = new_ring_memory(count, buffer_bytes)
        try:
            self._ring = SharedRing(memory, count, buffer_bytes)
            self._held.callback(self._ring.close)
            connection = accept(listener)
            self._hold(connection)
            socket.send_fds(connection, [GEOMETRY.pack(count, buffer_bytes)], [memory])
        finally:
            os.close(memory)
        return connection

    def _take(self, frame: bytes) -> None:
        header = unpack_header(frame[:HEADER_BYTES])
        (buffer,) = BUFFER.unpack(frame[HEADER_BYTES:])
        self._window.take(header.seq)
        if buffer not in self._granted:
            raise BadMessage(f"payload {header.seq} in buffer {buffer}, which is not free")
        if header.payload_bytes > self._ring.buffer_bytes:
            raise BadMessage(f"payload {header.seq} of {header.payload_bytes} bytes")
        self._granted.remove(buffer)
        payload = self._ring.buffer(buffer)[: header.payload_bytes]
        self._listener.took(self._desk.take(self._lane, header, payload))
        self._emptied.append(buffer)

    def _give_credit(self) -> None:
        if not self._emptied:
            return
        self._window.grant(len(self._emptied))
        self._granted.update(self._emptied)
        self._stream.send(b"".join(map(BUFFER.pack, self._emptied)))
        self._emptied.clear()


def _receive_ring(connection: socket.socket) -> SharedRing:
    """What the sink sends first."""
    try:
        raw, fds, _, _ = socket.recv_fds(connection, GEOMETRY.size, 1, socket.MSG_CMSG_CLOEXEC)
    except BlockingIOError:
        raise TimeoutError("the sink has sent no ring") from None
    try:
        if len(raw) != GEOMETRY.size or len(fds) != 1:
            raise ConnectionError(f"the sink sent {len(raw)} bytes and {len(fds)} descriptors")
        return SharedRing(fds[0], *GEOMETRY.unpack(raw))
    finally:
        for fd in fds:
            os.close(fd)
