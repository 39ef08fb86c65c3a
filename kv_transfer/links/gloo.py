"""A link over `torch.distributed` Gloo: one two-rank group per lane and generation.

After each payload goes a *trailer* under its own tag, the payload's header, and both ends wait on
the trailer alone: when the peer dies in the middle of a payload, the payload's operation hangs
until its timeout, but the trailer's fails at once. A trailer that arrives means that the payload
before it is there.

Nothing wakes a thread that waits in Gloo, and a wait that expires closes the pair: hence
`signalled_lane`.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.distributed import ProcessGroupGloo

from kv_transfer.chunk_header import HEADER_BYTES, unpack_header
from kv_transfer.links.signalled_lane import SignalledReceiver, SignalledSender
from kv_transfer.links.staging import StagingRing

if TYPE_CHECKING:
    from kv_transfer.chunk_header import ChunkHeader
    from kv_transfer.incoming import ReceiveDesk
    from kv_transfer.links.interface import LinkChannel, LinkEnd, ReceiverListener, SenderListener
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
    ) -> LinkEnd:
        """See `LinkFactory.open_sender`."""
        port = _SendPort(self, channel.store)
        sender = SignalledSender(port, channel, queue, listener, self._ring(), self.timeout_s)
        sender.start(name)
        return sender

    def open_receiver(
        self,
        name: str,
        channel: LinkChannel,
        lane: int,
        desk: ReceiveDesk,
        listener: ReceiverListener,
    ) -> LinkEnd:
        """See `LinkFactory.open_receiver`."""
        port = _ReceivePort(self, channel.store)
        receiver = SignalledReceiver(
            port, channel, (lane, desk), listener, self._ring(), self.timeout_s
        )
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

    def _ring(self) -> StagingRing:
        return StagingRing(self.buffers, self.buffer_bytes)


def tags_of(seq: int) -> tuple[int, int]:
    """Under which a payload and its trailer travel."""
    base = 2 * (seq % _TAG_WRAP)
    return base, base + 1


@dataclass(frozen=True, slots=True, eq=False)
class _InFlight:
    """A payload and its trailer in Gloo's hands. The tensors must outlive the operations."""

    buffer: int
    payload: torch.Tensor
    payload_work: Work
    trailer: torch.Tensor
    trailer_work: Work


class _GlooPort:
    """One end of a group, and what is in flight on it, in sequence."""

    rank: int

    def __init__(self, factory: GlooLinkFactory, store: RendezvousStore) -> None:
        self._factory = factory
        self._store = store
        self._group: Group = None
        self._in_flight: deque[_InFlight] = deque()

    def connect(self) -> None:
        """See `Port.connect`."""
        self._group = self._factory.connect(self._store, self.rank)

    def interrupt(self) -> None:
        """See `Port.interrupt`: Gloo has nothing that would."""

    def drop(self) -> None:
        """See `Port.drop`. Operations keep the group alive, and it its threads and connection."""
        self._in_flight.clear()
        self._group = None

    def _await_oldest(self) -> tuple[int, ChunkHeader]:
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
        self._in_flight.popleft()
        return flight.buffer, unpack_header(flight.trailer.numpy().tobytes())


class _SendPort(_GlooPort):
    """Implements `SendPort`."""

    rank = SOURCE_RANK

    def __init__(self, factory: GlooLinkFactory, store: RendezvousStore) -> None:
        super().__init__(factory, store)
        self._without_trailer: tuple[int, torch.Tensor, Work] | None = None

    def send_payload(self, buffer: int, payload: torch.Tensor, seq: int) -> None:
        """See `SendPort.send_payload`."""
        payload_tag, _ = tags_of(seq)
        work = self._group.send([payload], SINK_RANK, payload_tag)
        self._without_trailer = buffer, payload, work

    def send_header(self, header: ChunkHeader) -> None:
        """See `SendPort.send_header`."""
        assert self._without_trailer is not None, "a header without its payload"
        _, trailer_tag = tags_of(header.seq)
        trailer = torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8)
        work = self._group.send([trailer], SINK_RANK, trailer_tag)
        self._in_flight.append(_InFlight(*self._without_trailer, trailer, work))
        self._without_trailer = None

    def await_sent(self) -> tuple[int, ChunkHeader]:
        """See `SendPort.await_sent`."""
        return self._await_oldest()

    def drop(self) -> None:
        """See `Port.drop`."""
        self._without_trailer = None
        super().drop()


class _ReceivePort(_GlooPort):
    """Implements `ReceivePort`: a receive is posted into every free buffer."""

    rank = SINK_RANK

    def make_ready(self, buffer: int, memory: torch.Tensor, seq: int) -> None:
        """See `ReceivePort.make_ready`."""
        payload_tag, trailer_tag = tags_of(seq)
        trailer = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
        payload_work = self._group.recv([memory], SOURCE_RANK, payload_tag)
        trailer_work = self._group.recv([trailer], SOURCE_RANK, trailer_tag)
        self._in_flight.append(_InFlight(buffer, memory, payload_work, trailer, trailer_work))

    def await_payload(self) -> tuple[int, ChunkHeader]:
        """See `ReceivePort.await_payload`."""
        return self._await_oldest()
