"""What every link must do, run over each implementation."""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue

import pytest
import torch

from kv_transfer.gloo_link import GlooLinkFactory
from kv_transfer.rendezvous import RendezvousStore
from kvferry.clock import MonotonicClock
from tests.support.memory_link import MemoryLinkFactory

BUFFERS, BUFFER_BYTES, TIMEOUT_S = 3, 4096, 1.0
PATIENCE_S = 10.0


class Reports:
    """A listener that keeps what a link reports."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[tuple] = SimpleQueue()

    def built(self) -> None:
        self.queue.put(("built",))

    def sent(self, seq) -> None:
        self.queue.put(("sent", seq))

    def posted(self, buffers) -> None:
        self.queue.put(("posted", buffers))

    def arrived(self, seq, buffer, payload) -> None:
        self.queue.put(("arrived", seq, buffer, payload))

    def failed(self, reason) -> None:
        self.queue.put(("failed", reason))

    def expect(self, kind):
        """The next report, which must be of this kind."""
        report = self.queue.get(timeout=PATIENCE_S)
        assert report[0] == kind, report
        return report[1:]

    def silent_for(self, seconds) -> bool:
        try:
            self.queue.get(timeout=seconds)
        except Empty:
            return True
        return False


class Wire:
    """The two stores of one generation, each mirrored into the other."""

    def __init__(self) -> None:
        self.source = RendezvousStore(lambda key, value: self.sink.put(key, value), TIMEOUT_S)
        self.sink = RendezvousStore(lambda key, value: self.source.put(key, value), TIMEOUT_S)


class LinkPair:
    def __init__(self, factory, generation=1) -> None:
        self.sent, self.received, self.wire = Reports(), Reports(), Wire()
        self.sender = factory.open_sender(generation, self.wire.source, self.sent)
        self.receiver = factory.open_receiver(generation, self.wire.sink, self.received)

    def build(self):
        self.sent.expect("built")
        self.received.expect("built")
        assert self.received.expect("posted") == (BUFFERS,)
        return self

    def send(self, seq, payload):
        self.sender.send(seq, payload)
        self.receiver.expect(seq, payload.numel())

    def close(self):
        self.sender.close("test ends")
        self.receiver.close("test ends")


@pytest.fixture(params=["gloo", "memory"])
def factory(request):
    if request.param == "gloo":
        return GlooLinkFactory("127.0.0.1", TIMEOUT_S, BUFFERS, BUFFER_BYTES)
    return MemoryLinkFactory(BUFFERS, BUFFER_BYTES, TIMEOUT_S)


@pytest.fixture
def link(factory):
    pair = LinkPair(factory).build()
    yield pair
    pair.close()


def payload_of(seq, size=BUFFER_BYTES):
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.manual_seed(seq))


def test_payloads_arrive_unchanged_and_in_order(link):
    payloads = [payload_of(0), payload_of(1, 7), payload_of(2, 1000)]
    for seq, payload in enumerate(payloads):
        link.send(seq, payload)
    buffers = set()
    for seq, payload in enumerate(payloads):
        came, buffer, data = link.received.expect("arrived")
        assert came == seq
        assert torch.equal(data, payload)
        buffers.add(buffer)
        assert link.sent.expect("sent") == (seq,)
    assert len(buffers) == BUFFERS


def test_a_recycled_buffer_is_new_credit_and_carries_the_next_payload(link):
    for seq in range(4 * BUFFERS):
        payload = payload_of(seq, 100 + seq)
        link.send(seq, payload)
        came, buffer, data = link.received.expect("arrived")
        assert came == seq
        assert torch.equal(data, payload)
        link.receiver.recycle(buffer)
        assert link.received.expect("posted") == (1,)


def test_a_payload_is_left_alone_until_its_buffer_is_recycled(link):
    first = payload_of(0)
    link.send(0, first)
    _, buffer, data = link.received.expect("arrived")
    for seq in (1, 2):
        link.send(seq, payload_of(seq))
        link.received.expect("arrived")
    assert torch.equal(data, first)
    link.receiver.recycle(buffer)
    link.received.expect("posted")


def test_a_doubled_header_is_ignored(link):
    link.send(0, payload_of(0))
    link.receiver.expect(0, BUFFER_BYTES)
    link.send(1, payload_of(1))
    assert link.received.expect("arrived")[0] == 0
    assert link.received.expect("arrived")[0] == 1


def test_a_gap_ends_the_generation(link):
    link.receiver.expect(1, 10)
    (reason,) = link.received.expect("failed")
    assert "payload 1" in reason


def test_a_length_other_than_announced_ends_the_generation(link):
    link.sender.send(0, payload_of(0, 100))
    link.receiver.expect(0, 99)
    (reason,) = link.received.expect("failed")
    assert "99 bytes announced" in reason


def test_a_header_without_its_payload_ends_the_generation_in_time(link):
    link.receiver.expect(0, 10)
    (reason,) = link.received.expect("failed")
    assert "payload 0" in reason


def test_close_ends_both_ends_once(link):
    link.sender.close("enough")
    link.receiver.close("enough")
    assert link.sent.expect("failed") == ("enough",)
    assert link.received.expect("failed") == ("enough",)
    link.receiver.close("again")
    assert link.received.silent_for(0.05)


def test_a_closed_peer_fails_the_payload_that_is_waited_for(link):
    link.receiver.expect(0, 10)
    link.sender.close("gone")
    link.sent.expect("failed")
    start = MonotonicClock().now()
    assert link.received.expect("failed")[0]
    assert MonotonicClock().now() - start < TIMEOUT_S / 2


def test_building_ends_when_the_rendezvous_is_closed(factory):
    wire, reports = Wire(), Reports()
    factory.open_sender(1, wire.source, reports)
    wire.source.close("no session")
    (reason,) = reports.expect("failed")
    assert "no session" in reason


def test_generations_are_independent(factory):
    old, new = LinkPair(factory, 1).build(), LinkPair(factory, 2).build()
    old.close()
    old.sent.expect("failed")
    payload = payload_of(3)
    new.send(0, payload)
    assert torch.equal(new.received.expect("arrived")[2], payload)
    new.close()


def test_link_threads_are_daemons_and_end(link):
    threads = [thread for thread in threading.enumerate() if "-1" in thread.name]
    assert len(threads) >= 2
    assert all(thread.daemon for thread in threads)
    link.close()
    link.sent.expect("failed")
    link.received.expect("failed")
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
