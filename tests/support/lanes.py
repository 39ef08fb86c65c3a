"""One lane between two ends, without a session: real queue, desk and pools. For tests."""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
import torch

from kv_transfer.incoming import IncomingLane, IncomingStream, ReceiveDesk
from kv_transfer.links.rendezvous import RendezvousStore
from kv_transfer.outgoing import OutgoingStream, SendQueue
from kv_transfer.protocol.coverage import Coverage
from kv_transfer.protocol.lanes import Heads
from kv_transfer.protocol.region import Region
from kvferry.config import KvDType
from mem_cache.layout import KvLayout
from mem_cache.mha_pool import MHATokenToKVPool

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_transfer.links.interface import LinkEnd, LinkFactory
    from kv_transfer.protocol.messages import Signal

PATIENCE_S = 60.0

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=4, dtype=KvDType.FLOAT32, page_size=4)
"""64 bytes a token."""


class Reports:
    """A listener that keeps what an end reports."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[tuple] = SimpleQueue()

    def built(self) -> None:
        self.queue.put(("built",))

    def sent(self, header) -> None:
        self.queue.put(("sent", header))

    def took(self, taken) -> None:
        self.queue.put(("took", taken))

    def failed(self, reason) -> None:
        self.queue.put(("failed", reason))

    def expect(self, kind, timeout_s=PATIENCE_S):
        """The next report, which must be of this kind."""
        report = self.queue.get(timeout=timeout_s)
        assert report[0] == kind, report
        return report[1:]

    def failure(self, timeout_s=PATIENCE_S) -> str:
        """Why the end has ended; what it reported before that does not matter."""
        while (report := self.queue.get(timeout=timeout_s))[0] != "failed":
            pass
        return report[1]

    def silent_for(self, seconds) -> bool:
        try:
            self.queue.get(timeout=seconds)
        except Empty:
            return True
        return False


class Channel:
    """A lane end's way to the other one, where nothing is lost."""

    def __init__(self, timeout_s: float) -> None:
        self.store = RendezvousStore(lambda key, value: self.publish(key, value), timeout_s)
        self.publish: Callable[[str, bytes], None]
        self._lock = threading.Lock()
        self._tell: Callable[[Signal, int], None] | None = None
        self._early: list[tuple[Signal, int]] = []

    def lead_to(self, tell: Callable[[Signal, int], None]) -> None:
        """Give all signals, those that were made before too, to that function."""
        with self._lock:
            for signal, value in self._early:
                tell(signal, value)
            self._tell = tell

    def signal(self, signal: Signal, value: int) -> None:
        with self._lock:
            if self._tell is None:
                self._early.append((signal, value))
            else:
                self._tell(signal, value)


def kv_bits(pool: MHATokenToKVPool, tokens: int) -> torch.Tensor:
    """The first `tokens` slots, as integers: random bits may be no number."""
    return pool.buffer[:, :, :tokens].contiguous().view(torch.int32)


def channel_pair(timeout_s: float) -> tuple[Channel, Channel]:
    one, other = Channel(timeout_s), Channel(timeout_s)
    one.publish, other.publish = other.store.put, one.store.put
    return one, other


class SourceSide:
    """A pool with random KV, and a queue."""

    def __init__(self, buffer_bytes: int, layout: KvLayout = LAYOUT, tokens: int = 4096) -> None:
        self.layout = layout
        self.pool = MHATokenToKVPool(layout, tokens)
        words = self.pool.buffer.view(-1).view(torch.int32)
        words.random_(0, 2**31 - 1, generator=torch.manual_seed(1))
        self.queue = SendQueue(buffer_bytes, checksums=False)
        self.reports = Reports()
        self.end: LinkEnd | None = None

    def open(self, factory: LinkFactory, name: str, channel: Channel) -> None:
        self.end = factory.open_sender(name, channel, self.queue, self.reports)

    def submit(self, stream_number: int, tokens: int) -> OutgoingStream:
        """Let all layers of the first `tokens` slots leave."""
        stream = OutgoingStream(stream_number, self.pool, Heads(0, self.layout.heads))
        region = Region(0, tokens, 0, self.layout.num_layers)
        self.queue.submit(stream, region, np.arange(tokens))
        return stream


class SinkSide:
    """An empty pool, and a desk."""

    def __init__(self, layout: KvLayout = LAYOUT, tokens: int = 4096) -> None:
        self.layout = layout
        self.pool = MHATokenToKVPool(layout, tokens)
        self.desk = ReceiveDesk()
        self.reports = Reports()
        self.end: LinkEnd | None = None

    def open(self, factory: LinkFactory, name: str, channel: Channel) -> None:
        self.end = factory.open_receiver(name, channel, 0, self.desk, self.reports)

    def expect(self, stream_number: int, tokens: int) -> IncomingStream:
        """Take that stream into the first `tokens` slots."""
        coverage = Coverage(0, tokens, self.layout.num_layers)
        lane = IncomingLane(self.pool, Heads(0, self.layout.heads), coverage)
        stream = IncomingStream(stream_number, np.arange(tokens), 0, {0: lane})
        self.desk.expect(stream)
        return stream

    def wait_all(self, timeout_s: float = PATIENCE_S) -> list:
        """Headers of the payloads up to the last cell of a stream."""
        headers = []
        while True:
            (taken,) = self.reports.expect("took", timeout_s)
            headers.append(taken.header)
            if taken.remaining == 0:
                return headers


class LanePair:
    """Both ends in this process."""

    def __init__(self, factory: LinkFactory, buffer_bytes: int, timeout_s: float, name="lane"):
        self.at_source, self.at_sink = channel_pair(timeout_s)
        self.source, self.sink = SourceSide(buffer_bytes), SinkSide()
        self.source.open(factory, f"{name}-send", self.at_source)
        self.sink.open(factory, f"{name}-receive", self.at_sink)
        self.at_source.lead_to(self.sink.end.on_signal)
        self.at_sink.lead_to(self.source.end.on_signal)

    def build(self):
        self.source.reports.expect("built")
        self.sink.reports.expect("built")
        return self

    def check_same_kv(self, tokens: int) -> None:
        assert torch.equal(kv_bits(self.sink.pool, tokens), kv_bits(self.source.pool, tokens))

    def transfer(self, stream_number: int, tokens: int) -> list:
        """A whole handoff; the headers of its payloads."""
        self.sink.pool.buffer.zero_()
        incoming = self.sink.expect(stream_number, tokens)
        self.source.submit(stream_number, tokens)
        headers = self.sink.wait_all()
        self.sink.desk.forget(incoming)
        for header in headers:
            (sent,) = self.source.reports.expect("sent")
            assert (sent.seq, sent.region) == (header.seq, header.region)
        self.check_same_kv(tokens)
        return headers

    def close(self, reason="test ends") -> None:
        self.source.end.close(reason)
        self.sink.end.close(reason)
