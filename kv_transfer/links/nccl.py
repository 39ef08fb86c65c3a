"""A link over `torch.distributed` NCCL, from one CUDA device to another.

It has never run on a GPU: its tests check which calls it makes, on a group that is no NCCL.

A lane's thread has a stream of its own, on which the pool's copies run too; a pool on a device
ends `gather` and `scatter` only when their copies have ended, for that is what a gate protects.
A receive must have the size of what comes, so that the header goes first, and the payload's
receive is posted when the header is here. Nothing is posted ahead: a receive that waits keeps a
part of the device busy.
"""

from __future__ import annotations

import threading
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from kv_transfer.chunk_header import HEADER_BYTES, unpack_header
from kv_transfer.links.interface import LinkClosed
from kv_transfer.links.signalled_lane import SignalledReceiver, SignalledSender
from kv_transfer.links.staging import StagingRing
from kv_transfer.protocol.errors import BadMessage
from kvferry.clock import MonotonicClock

if TYPE_CHECKING:
    from kv_transfer.chunk_header import ChunkHeader
    from kv_transfer.incoming import ReceiveDesk
    from kv_transfer.links.interface import LinkChannel, LinkEnd, ReceiverListener, SenderListener
    from kv_transfer.links.rendezvous import RendezvousStore
    from kv_transfer.outgoing import SendQueue

_SOURCE_RANK, _SINK_RANK = 0, 1
_TAG = 0
"""NCCL has none: operations meet in order."""

_POLL_S = 50e-6
"""Between two looks at an event: a fraction of what a payload takes."""

_WATCHDOG_FACTOR = 10
"""Torch's watchdog ends the process at its own timeout; ours comes first and ends the link."""

Group: TypeAlias = Any
_CUDA: Any = torch.cuda
"""Torch's stubs lack the constructors."""


class Event(Protocol):
    """A mark on a stream."""

    def query(self) -> bool:
        """Whether everything before it is done."""
        ...


class Device(Protocol):
    """What is needed of CUDA; `CudaDevice`, or something else in tests."""

    def begin_thread(self) -> None:
        """Give the calling thread a stream of its own."""
        ...

    def mark(self) -> Event:
        """A mark on the calling thread's stream, behind what has been put there."""
        ...

    def ring(self, count: int, buffer_bytes: int) -> StagingRing:
        """Staging buffers on the device."""
        ...

    def group(self, store: RendezvousStore, rank: int, timeout_s: float) -> Group:
        """One end of a two-rank group."""
        ...

    def tensor(self, content: bytes) -> torch.Tensor:
        """uint8 [len(content)] on the device."""
        ...


class CudaDevice:
    """The current CUDA device. Implements `Device`."""

    def begin_thread(self) -> None:
        """See `Device.begin_thread`."""
        torch.cuda.set_stream(_CUDA.Stream())

    def mark(self) -> Event:
        """See `Device.mark`."""
        event: Event = _CUDA.Event()
        _CUDA.current_stream().record_event(event)
        return event

    def ring(self, count: int, buffer_bytes: int) -> StagingRing:
        """See `Device.ring`."""
        return StagingRing(count, buffer_bytes, "cuda")

    def group(self, store: RendezvousStore, rank: int, timeout_s: float) -> Group:
        """See `Device.group`."""
        # Absent from torch's builds without CUDA.
        from torch.distributed import ProcessGroupNCCL

        nccl: Any = ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timedelta(seconds=_WATCHDOG_FACTOR * timeout_s)
        return nccl(store, rank, 2, options)

    def tensor(self, content: bytes) -> torch.Tensor:
        """See `Device.tensor`."""
        return torch.frombuffer(bytearray(content), dtype=torch.uint8).to("cuda")


class NcclLinkFactory:
    """Links of one worker whose KV is on a CUDA device."""

    def __init__(
        self, timeout_s: float, buffers: int, buffer_bytes: int, device: Device | None = None
    ) -> None:
        self.timeout_s = timeout_s
        self._buffers = buffers
        self._buffer_bytes = buffer_bytes
        self.device = device or CudaDevice()

    def open_sender(
        self, name: str, channel: LinkChannel, queue: SendQueue, listener: SenderListener
    ) -> LinkEnd:
        """See `LinkFactory.open_sender`."""
        ring = self.device.ring(self._buffers, self._buffer_bytes)
        port = _SendPort(self, channel.store)
        sender = SignalledSender(port, channel, queue, listener, ring, self.timeout_s)
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
        ring = self.device.ring(self._buffers, self._buffer_bytes)
        port = _ReceivePort(self, channel.store)
        receiver = SignalledReceiver(port, channel, (lane, desk), listener, ring, self.timeout_s)
        receiver.start(name)
        return receiver


class _NcclPort:
    """One end of a group, and how its waits end."""

    rank: int

    def __init__(self, factory: NcclLinkFactory, store: RendezvousStore) -> None:
        self._factory = factory
        self._device = factory.device
        self._store = store
        self._clock = MonotonicClock()
        self._interrupted = threading.Event()
        self._group: Group = None

    def connect(self) -> None:
        """See `Port.connect`."""
        self._device.begin_thread()
        self._group = self._device.group(self._store, self.rank, self._factory.timeout_s)

    def interrupt(self) -> None:
        """See `Port.interrupt`. The first operation builds the communicator, and waits for it."""
        self._interrupted.set()
        group = self._group
        if group is not None:
            group.abort()

    def drop(self) -> None:
        """See `Port.drop`. What the peer will never answer would keep the device busy."""
        if self._group is not None:
            self._group.abort()
            self._group = None

    def _await(self, event: Event) -> None:
        until_s = self._clock.now() + self._factory.timeout_s
        while not event.query():
            if self._interrupted.wait(_POLL_S):
                raise LinkClosed("closed while a payload was under way")
            if self._clock.now() > until_s:
                raise TimeoutError(f"a payload has not passed in {self._factory.timeout_s:g} s")


class _SendPort(_NcclPort):
    """Implements `SendPort`."""

    rank = _SOURCE_RANK

    def __init__(self, factory: NcclLinkFactory, store: RendezvousStore) -> None:
        super().__init__(factory, store)
        self._next: tuple[int, torch.Tensor] | None = None
        self._in_flight: deque[tuple[Event, int, ChunkHeader]] = deque()

    def send_payload(self, buffer: int, payload: torch.Tensor, seq: int) -> None:
        """See `SendPort.send_payload`: it follows its header."""
        del seq
        self._next = buffer, payload

    def send_header(self, header: ChunkHeader) -> None:
        """See `SendPort.send_header`."""
        assert self._next is not None, "a header without its payload"
        (buffer, payload), self._next = self._next, None
        for content in (self._device.tensor(header.pack()), payload):
            # The wait is the stream's, which puts the mark behind the operation.
            self._group.send([content], _SINK_RANK, _TAG).wait()
        self._in_flight.append((self._device.mark(), buffer, header))

    def await_sent(self) -> tuple[int, ChunkHeader]:
        """See `SendPort.await_sent`."""
        event, buffer, header = self._in_flight[0]
        self._await(event)
        self._in_flight.popleft()
        return buffer, header


class _ReceivePort(_NcclPort):
    """Implements `ReceivePort`."""

    rank = _SINK_RANK

    def __init__(self, factory: NcclLinkFactory, store: RendezvousStore) -> None:
        super().__init__(factory, store)
        self._ready: deque[tuple[int, torch.Tensor]] = deque()

    def make_ready(self, buffer: int, memory: torch.Tensor, seq: int) -> None:
        """See `ReceivePort.make_ready`."""
        del seq
        self._ready.append((buffer, memory))

    def await_payload(self) -> tuple[int, ChunkHeader]:
        """See `ReceivePort.await_payload`."""
        raw = self._device.tensor(bytes(HEADER_BYTES))
        self._receive(raw)
        header = unpack_header(raw.cpu().numpy().tobytes())
        buffer, memory = self._ready.popleft()
        if header.payload_bytes > memory.numel():
            raise BadMessage(f"payload {header.seq} of {header.payload_bytes} bytes")
        self._receive(memory[: header.payload_bytes])
        return buffer, header

    def _receive(self, out: torch.Tensor) -> None:
        self._group.recv([out], _SOURCE_RANK, _TAG).wait()
        self._await(self._device.mark())
