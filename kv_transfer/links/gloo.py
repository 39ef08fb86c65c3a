"""A link over `torch.distributed` Gloo: one two-rank group per generation, no global group.

After each payload goes a small *trailer* under its own tag, and both ends wait on the trailer:
when the peer dies in the middle of a payload, the payload's operation hangs until its timeout, but
the trailer's fails at once. A trailer that arrives means that the payload before it is there. It
repeats sequence number and length, so that a mix-up cannot pass.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.distributed import ProcessGroupGloo

from kv_transfer.links.interface import LinkClosed
from kv_transfer.links.staging import StagingRing

if TYPE_CHECKING:
    from kv_transfer.links.interface import ReceiverListener, SenderListener
    from kv_transfer.links.rendezvous import RendezvousStore

_LOG = logging.getLogger(__name__)

_SOURCE_RANK, _SINK_RANK = 0, 1

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
        self._timeout = timedelta(seconds=timeout_s)
        self._buffers = buffers
        self._buffer_bytes = buffer_bytes

    def open_sender(
        self, generation: int, store: RendezvousStore, listener: SenderListener
    ) -> GlooSender:
        """Start the source's end on a thread of its own."""
        sender = GlooSender(self.connect, store, listener, self._timeout)
        sender.start(f"link-{generation}-send")
        return sender

    def open_receiver(
        self, generation: int, store: RendezvousStore, listener: ReceiverListener
    ) -> GlooReceiver:
        """Start the sink's end on a thread of its own."""
        ring = StagingRing(self._buffers, self._buffer_bytes)
        receiver = GlooReceiver(self.connect, store, listener, self._timeout, ring)
        receiver.start(f"link-{generation}-receive")
        return receiver

    def connect(self, store: RendezvousStore, rank: int) -> Group:
        """Build the two-rank group; blocks until the peer builds its end."""
        options = _Gloo._Options()
        options._devices = [_Gloo.create_device(hostname=self._host)]
        options._timeout = self._timeout
        # One thread per group: more of them only wake one another on a busy core.
        options._threads = 1
        return _Gloo(store, rank, 2, options)


@dataclass(frozen=True, slots=True)
class _Close:
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class _Send:
    seq: int
    payload: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Expect:
    seq: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class _Recycle:
    buffer: int


@dataclass(frozen=True, slots=True, eq=False)
class _InFlight:
    seq: int
    payload: torch.Tensor
    trailer: torch.Tensor
    payload_work: Work
    trailer_work: Work


def _tags(seq: int) -> tuple[int, int]:
    base = 2 * (seq % _TAG_WRAP)
    return base, base + 1


class _GlooEnd:
    """The thread of one end, and how it ends."""

    def __init__(
        self,
        connect: Any,
        store: RendezvousStore,
        listener: SenderListener | ReceiverListener,
        timeout: timedelta,
    ) -> None:
        self._connect = connect
        self._store = store
        self._failed = listener.failed
        self._timeout = timeout
        self._inbox: SimpleQueue[_Send | _Expect | _Recycle | _Close] = SimpleQueue()

    def start(self, name: str) -> None:
        """Begin. A daemon: a thread held by a dead peer must not keep the process."""
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def close(self, reason: str) -> None:
        """End the generation as soon as the thread is not inside an operation."""
        self._store.close(reason)
        self._inbox.put(_Close(reason))

    def _run(self) -> None:
        try:
            self._serve()
        except LinkClosed as closed:
            reason = str(closed)
        except Exception as error:  # noqa: BLE001  # outermost frame: ends the generation
            reason = f"{type(error).__name__}: {error}"
            _LOG.info("link ended", extra={"reason": reason})
        else:
            reason = "its thread returned"
        # Operations keep the group alive: let go of them before the end is reported.
        self._drop()
        self._failed(reason)

    def _serve(self) -> None:
        raise NotImplementedError

    def _drop(self) -> None:
        raise NotImplementedError

    def _await(self, flight: _InFlight) -> None:
        """Wait until a payload has passed, through its trailer."""
        try:
            flight.trailer_work.wait(self._timeout)
        except RuntimeError as error:
            try:
                flight.payload_work.wait(_REAP)
            except RuntimeError:
                _LOG.debug("reaped a hung payload", extra={"seq": flight.seq})
            raise RuntimeError(f"payload {flight.seq}: {error}") from error
        flight.payload_work.wait(_THERE)


class GlooSender(_GlooEnd):
    """The source's end."""

    def __init__(
        self,
        connect: Any,
        store: RendezvousStore,
        listener: SenderListener,
        timeout: timedelta,
    ) -> None:
        super().__init__(connect, store, listener, timeout)
        self._listener = listener
        self._in_flight: deque[_InFlight] = deque()

    def send(self, seq: int, payload: torch.Tensor) -> None:
        """Send `payload` (uint8), which must stay unchanged until `sent`."""
        self._inbox.put(_Send(seq, payload))

    def _serve(self) -> None:
        group = self._connect(self._store, _SOURCE_RANK)
        self._listener.built()
        while True:
            try:
                order = self._inbox.get(block=not self._in_flight)
            except Empty:
                self._complete_oldest()
                continue
            match order:
                case _Send(seq, payload):
                    self._in_flight.append(self._post(group, seq, payload))
                case _Close(reason):
                    raise LinkClosed(reason)
                case _:
                    raise AssertionError(f"{order} at a sender")

    def _drop(self) -> None:
        self._in_flight.clear()

    def _post(self, group: Group, seq: int, payload: torch.Tensor) -> _InFlight:
        payload_tag, trailer_tag = _tags(seq)
        trailer = torch.tensor([seq, payload.numel()], dtype=torch.int64)
        return _InFlight(
            seq,
            payload,
            trailer,
            group.send([payload], _SINK_RANK, payload_tag),
            group.send([trailer], _SINK_RANK, trailer_tag),
        )

    def _complete_oldest(self) -> None:
        flight = self._in_flight[0]
        self._await(flight)
        self._in_flight.popleft()
        self._listener.sent(flight.seq)


class GlooReceiver(_GlooEnd):
    """The sink's end: a receive is posted into every free buffer, ahead of its header."""

    def __init__(
        self,
        connect: Any,
        store: RendezvousStore,
        listener: ReceiverListener,
        timeout: timedelta,
        ring: StagingRing,
    ) -> None:
        super().__init__(connect, store, listener, timeout)
        self._listener = listener
        self._ring = ring
        self._posted: deque[tuple[int, _InFlight]] = deque()
        self._next_post = 0
        self._next_expected = 0

    def expect(self, seq: int, payload_bytes: int) -> None:
        """The header of payload `seq` has come: report it when it is there."""
        self._inbox.put(_Expect(seq, payload_bytes))

    def recycle(self, buffer: int) -> None:
        """The payload in `buffer` has been used; post the next receive into it."""
        self._inbox.put(_Recycle(buffer))

    def _serve(self) -> None:
        group = self._connect(self._store, _SINK_RANK)
        for _ in range(len(self._ring)):
            self._post(group)
        self._listener.built()
        self._listener.posted(len(self._ring))
        while True:
            match self._inbox.get():
                case _Expect(seq, payload_bytes):
                    self._receive(seq, payload_bytes)
                case _Recycle(buffer):
                    self._ring.give_back(buffer)
                    self._post(group)
                    self._listener.posted(1)
                case _Close(reason):
                    raise LinkClosed(reason)
                case order:
                    raise AssertionError(f"{order} at a receiver")

    def _drop(self) -> None:
        self._posted.clear()

    def _post(self, group: Group) -> None:
        """Post the next receive in sequence; any payload fits, for buffers are full size."""
        buffer = self._ring.take()
        seq = self._next_post
        self._next_post += 1
        payload_tag, trailer_tag = _tags(seq)
        payload = self._ring.buffer(buffer)
        trailer = torch.zeros(2, dtype=torch.int64)
        flight = _InFlight(
            seq,
            payload,
            trailer,
            group.recv([payload], _SOURCE_RANK, payload_tag),
            group.recv([trailer], _SOURCE_RANK, trailer_tag),
        )
        self._posted.append((buffer, flight))

    def _receive(self, seq: int, payload_bytes: int) -> None:
        if seq < self._next_expected:
            return
        if seq > self._next_expected or not self._posted:
            raise RuntimeError(
                f"header of payload {seq} where {self._next_expected} is next,"
                f" {len(self._posted)} receives posted"
            )
        buffer, flight = self._posted.popleft()
        self._await(flight)
        if flight.trailer.tolist() != [seq, payload_bytes]:
            raise RuntimeError(
                f"payload {seq} of {payload_bytes} bytes announced, came as"
                f" {flight.trailer.tolist()}"
            )
        self._next_expected += 1
        self._listener.arrived(seq, buffer, flight.payload[:payload_bytes])
