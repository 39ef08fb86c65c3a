"""A link inside one process, under the same contract as the real ones. For tests."""

from __future__ import annotations

import threading
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING

from kv_transfer.link import LinkClosed
from kv_transfer.staging import StagingRing

if TYPE_CHECKING:
    import torch

    from kv_transfer.link import ReceiverListener, SenderListener
    from kv_transfer.rendezvous import RendezvousStore


class MemoryLinkFactory:
    """Both ends must come from the same factory; payloads are copied between their buffers."""

    def __init__(self, buffers: int, buffer_bytes: int, timeout_s: float = 5.0) -> None:
        self._buffers = buffers
        self._buffer_bytes = buffer_bytes
        self._timeout_s = timeout_s
        self._receivers: dict[str, MemoryReceiver] = {}

    def open_sender(
        self, generation: int, store: RendezvousStore, listener: SenderListener
    ) -> MemorySender:
        """Start the source's end on a thread of its own."""
        sender = MemorySender(self._receivers, store, listener)
        threading.Thread(target=sender.run, name=f"memory-send-{generation}", daemon=True).start()
        return sender

    def open_receiver(
        self, generation: int, store: RendezvousStore, listener: ReceiverListener
    ) -> MemoryReceiver:
        """Start the sink's end on a thread of its own."""
        ring = StagingRing(self._buffers, self._buffer_bytes)
        receiver = MemoryReceiver(store, listener, ring, self._timeout_s)
        name = f"{generation}-{id(receiver)}"
        self._receivers[name] = receiver
        thread = threading.Thread(
            target=receiver.run, args=(name,), name=f"memory-receive-{generation}", daemon=True
        )
        thread.start()
        return receiver


class MemorySender:
    """The source's end."""

    def __init__(
        self,
        receivers: dict[str, MemoryReceiver],
        store: RendezvousStore,
        listener: SenderListener,
    ) -> None:
        self._receivers = receivers
        self._store = store
        self._listener = listener
        self._inbox: SimpleQueue[tuple[int, torch.Tensor] | str] = SimpleQueue()

    def send(self, seq: int, payload: torch.Tensor) -> None:
        """Send `payload` (uint8), which must stay unchanged until `sent`."""
        self._inbox.put((seq, payload))

    def close(self, reason: str) -> None:
        """End the generation."""
        self._store.close(reason)
        self._inbox.put(reason)

    def run(self) -> None:
        """The thread: copy payloads until closed."""
        try:
            peer = self._receivers[self._store.get("receiver").decode()]
            peer.on_peer_gone = self.close
            self._listener.built()
            while not isinstance(order := self._inbox.get(), str):
                seq, payload = order
                peer.deliver(seq, payload)
                self._listener.sent(seq)
            reason = order
            peer.close(f"peer closed: {reason}")
        except Exception as error:  # noqa: BLE001  # outermost frame: ends the generation
            reason = f"{type(error).__name__}: {error}"
        self._listener.failed(reason)


class MemoryReceiver:
    """The sink's end."""

    def __init__(
        self,
        store: RendezvousStore,
        listener: ReceiverListener,
        ring: StagingRing,
        timeout_s: float,
    ) -> None:
        self._store = store
        self._listener = listener
        self._ring = ring
        self._timeout_s = timeout_s
        self._inbox: SimpleQueue[tuple[str, int, int] | str] = SimpleQueue()
        self._changed = threading.Condition()
        self._posted: deque[int] = deque()
        self._arrived: deque[tuple[int, int, int]] = deque()
        self._closed: str | None = None
        self._next_expected = 0
        self.on_peer_gone = self._ignore

    def _ignore(self, reason: str) -> None:
        """No peer yet."""

    def expect(self, seq: int, payload_bytes: int) -> None:
        """The header of payload `seq` has come: report it when it is there."""
        self._inbox.put(("expect", seq, payload_bytes))

    def recycle(self, buffer: int) -> None:
        """The payload in `buffer` has been used."""
        self._inbox.put(("recycle", buffer, 0))

    def close(self, reason: str) -> None:
        """End the generation."""
        self._store.close(reason)
        with self._changed:
            self._closed = self._closed or reason
            self._changed.notify_all()
        self._inbox.put(reason)

    def deliver(self, seq: int, payload: torch.Tensor) -> None:
        """On the sender's thread: copy into the next posted buffer."""
        with self._changed:
            there = self._changed.wait_for(lambda: self._posted or self._closed, self._timeout_s)
            if self._closed is not None or not there:
                raise RuntimeError(f"payload {seq} not received: {self._closed or 'timeout'}")
            buffer = self._posted.popleft()
            self._ring.buffer(buffer)[: payload.numel()].copy_(payload)
            self._arrived.append((seq, payload.numel(), buffer))
            self._changed.notify_all()

    def run(self, name: str) -> None:
        """The thread: report payloads until closed."""
        try:
            self._store.set("receiver", name)
            self._post(len(self._ring))
            self._listener.built()
            self._listener.posted(len(self._ring))
            while not isinstance(order := self._inbox.get(), str):
                self._obey(*order)
            raise LinkClosed(order)
        except LinkClosed as closed:
            reason = str(closed)
        except Exception as error:  # noqa: BLE001  # outermost frame: ends the generation
            reason = f"{type(error).__name__}: {error}"
        self.close(reason)
        self.on_peer_gone(f"peer closed: {reason}")
        self._listener.failed(reason)

    def _obey(self, what: str, number: int, payload_bytes: int) -> None:
        if what == "recycle":
            self._ring.give_back(number)
            self._post(1)
            self._listener.posted(1)
        elif number == self._next_expected:
            self._receive(number, payload_bytes)
        elif number > self._next_expected:
            raise RuntimeError(f"header of payload {number}, {self._next_expected} is next")

    def _post(self, buffers: int) -> None:
        with self._changed:
            self._posted.extend(self._ring.take() for _ in range(buffers))
            self._changed.notify_all()

    def _receive(self, seq: int, payload_bytes: int) -> None:
        with self._changed:
            there = self._changed.wait_for(lambda: self._arrived or self._closed, self._timeout_s)
            if self._closed is not None:
                raise LinkClosed(self._closed)
            if not there:
                raise RuntimeError(f"payload {seq}: timeout")
            came, came_bytes, buffer = self._arrived.popleft()
        if (came, came_bytes) != (seq, payload_bytes):
            raise RuntimeError(
                f"payload {seq} of {payload_bytes} bytes announced, came as {came, came_bytes}"
            )
        self._next_expected += 1
        self._listener.arrived(seq, buffer, self._ring.buffer(buffer)[:payload_bytes])
