"""What every link must do, run over each implementation. Its death by signal: see integration."""

from __future__ import annotations

import gc
import os
import threading
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from kv_transfer.chunk_header import ChunkHeader
from kv_transfer.incoming import ChunkFate
from kv_transfer.links.gloo import GlooLinkFactory
from kv_transfer.links.shared_memory import SharedMemoryLinkFactory
from kv_transfer.protocol.region import Region
from kvferry.clock import MonotonicClock
from tests.support.lanes import LAYOUT, PATIENCE_S, LanePair, SinkSide, SourceSide, channel_pair
from tests.support.memory_link import MemoryLinkFactory
from tests.support.rogue_ends import (
    RogueGlooSink,
    RogueGlooSource,
    RogueMemorySink,
    RogueMemorySource,
    RogueUnixSink,
    RogueUnixSource,
)
from tests.support.waiting import wait_until

BUFFERS, BUFFER_BYTES, TIMEOUT_S = 3, 4096, 1.0
CHUNK_TOKENS = BUFFER_BYTES // LAYOUT.bytes_per_token
PATIENT_S = 60.0
"""Of a link that ends long before its timeout: half of it tells the two apart on any machine."""


class Transport(NamedTuple):
    factory: Any
    rogue_source: Any
    rogue_sink: Any


def gloo(timeout_s=TIMEOUT_S, buffers=BUFFERS):
    factory = GlooLinkFactory("127.0.0.1", timeout_s, buffers, BUFFER_BYTES)
    return Transport(factory, RogueGlooSource, RogueGlooSink)


def shared_memory(timeout_s=TIMEOUT_S, buffers=BUFFERS):
    factory = SharedMemoryLinkFactory(timeout_s, buffers, BUFFER_BYTES)
    return Transport(factory, RogueUnixSource, RogueUnixSink)


def memory(timeout_s=TIMEOUT_S, buffers=BUFFERS):
    factory = MemoryLinkFactory(timeout_s, buffers, BUFFER_BYTES)
    return Transport(factory, RogueMemorySource, RogueMemorySink)


@pytest.fixture(autouse=True)
def _one_torch_thread():
    """Copies as small as these only wait for one another's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[gloo, shared_memory, memory])
def make_transport(request):
    return request.param


@pytest.fixture
def transport(make_transport):
    return make_transport()


@pytest.fixture
def lane(transport):
    pair = LanePair(transport.factory, BUFFER_BYTES, TIMEOUT_S).build()
    yield pair
    pair.close()


class Blocked:
    """Holds the sink's end inside the desk, as a copy that takes long would."""

    def __init__(self, lane, stream_number, tokens) -> None:
        self.stream = lane.sink.expect(stream_number, tokens)
        self.stream.gate.acquire()

    def release(self) -> None:
        self.stream.gate.release()


# --- payloads ---------------------------------------------------------------------------------


def test_kv_arrives_unchanged_and_in_order(lane):
    seqs = []
    for number, tokens in enumerate((1, CHUNK_TOKENS, 10 * BUFFERS * CHUNK_TOKENS + 5)):
        seqs += [header.seq for header in lane.transfer(number, tokens)]
    assert seqs == list(range(len(seqs)))
    assert len(seqs) == 2 + 10 * BUFFERS + 1


@pytest.mark.parametrize("buffers", [1, 2])
def test_a_small_ring_carries_everything_too(make_transport, buffers):
    pair = LanePair(make_transport(buffers=buffers).factory, BUFFER_BYTES, TIMEOUT_S).build()
    pair.transfer(1, 9 * CHUNK_TOKENS)
    pair.close()


def test_a_link_at_rest_outlives_its_timeout(make_transport):
    pair = LanePair(make_transport(timeout_s=0.2).factory, BUFFER_BYTES, 0.2).build()
    pair.transfer(1, 3 * CHUNK_TOKENS)
    assert pair.sink.reports.silent_for(0.5)
    pair.transfer(2, 3 * CHUNK_TOKENS)
    pair.close()


def test_streams_take_turns(lane):
    one, other = lane.sink.expect(1, 20 * CHUNK_TOKENS), lane.sink.expect(2, CHUNK_TOKENS)
    lane.source.submit(1, 20 * CHUNK_TOKENS)
    lane.source.submit(2, CHUNK_TOKENS)
    order = [lane.sink.reports.expect("took")[0].header.stream for _ in range(21)]
    assert order.index(2) < 20, order
    assert one.remaining == other.remaining == 0


def test_the_source_sends_no_more_than_the_sink_has_buffers(lane):
    tokens = 4 * BUFFERS * CHUNK_TOKENS
    blocked = Blocked(lane, 1, tokens)
    lane.source.submit(1, tokens)
    sent = [lane.source.reports.expect("sent")[0].seq for _ in range(BUFFERS)]
    assert sent == list(range(BUFFERS))
    assert lane.source.reports.silent_for(0.1)
    blocked.release()
    assert len(lane.sink.wait_all()) == 4 * BUFFERS
    lane.check_same_kv(tokens)


def test_a_payload_of_an_ended_handoff_is_dropped_and_the_next_one_is_not(lane):
    blocked = Blocked(lane, 1, BUFFERS * CHUNK_TOKENS)
    lane.source.submit(1, BUFFERS * CHUNK_TOKENS)
    for _ in range(BUFFERS):
        lane.source.reports.expect("sent")
    blocked.stream.is_open = False
    blocked.release()
    lane.sink.desk.forget(blocked.stream)
    fates = [lane.sink.reports.expect("took")[0].fate for _ in range(BUFFERS)]
    assert fates == [ChunkFate.DROPPED] * BUFFERS
    assert not lane.sink.pool.buffer.any()
    lane.transfer(2, 5 * CHUNK_TOKENS)


def test_a_stream_closed_at_the_source_leaves_the_link_alone(make_transport):
    """Its headers promised more; the sink's end must not go on waiting for that."""
    pair = LanePair(make_transport(timeout_s=0.3).factory, BUFFER_BYTES, 0.3).build()
    blocked = Blocked(pair, 1, 40 * CHUNK_TOKENS)
    stream = pair.source.submit(1, 40 * CHUNK_TOKENS)
    for _ in range(BUFFERS):
        pair.source.reports.expect("sent")
    unsent = pair.source.queue.close_stream(stream)
    gathered = 40 - unsent // BUFFER_BYTES
    assert gathered in (BUFFERS, BUFFERS + 1)
    blocked.release()
    for _ in range(gathered):
        pair.sink.reports.expect("took")
    for _ in range(gathered - BUFFERS):
        pair.source.reports.expect("sent")
    assert pair.sink.reports.silent_for(0.6)
    pair.transfer(2, 5 * CHUNK_TOKENS)
    pair.close()


def test_work_submitted_before_the_link_is_built_is_sent(transport):
    at_source, at_sink = channel_pair(TIMEOUT_S)
    source, sink = SourceSide(BUFFER_BYTES), SinkSide()
    source.submit(1, 2 * CHUNK_TOKENS)
    sink.expect(1, 2 * CHUNK_TOKENS)
    source.open(transport.factory, "send", at_source)
    sink.open(transport.factory, "receive", at_sink)
    at_source.lead_to(sink.end.on_signal)
    at_sink.lead_to(source.end.on_signal)
    sink.reports.expect("built")
    assert len(sink.wait_all()) == 2
    source.end.close("test ends")
    sink.end.close("test ends")


# --- ends -------------------------------------------------------------------------------------


@pytest.fixture
def patient_lane(make_transport):
    pair = LanePair(make_transport(timeout_s=PATIENT_S).factory, BUFFER_BYTES, PATIENT_S).build()
    yield pair
    pair.close()


def test_close_at_rest_ends_both_ends_once(patient_lane):
    lane = patient_lane
    started = MonotonicClock().now()
    lane.source.end.close("enough")
    assert lane.source.reports.failure() == "enough"
    lane.sink.end.close("enough")
    assert lane.sink.reports.failure()
    assert MonotonicClock().now() - started < PATIENT_S / 2
    lane.source.end.close("again")
    lane.sink.end.close("again")
    assert lane.source.reports.silent_for(0.02)
    assert lane.sink.reports.silent_for(0.02)


def _close_in_the_middle_of_payloads(lane, side):
    """The side that was closed."""
    lane.sink.expect(1, 4000)
    lane.source.submit(1, 4000)
    for _ in range(2 * BUFFERS):
        lane.sink.reports.expect("took")
    closed = {"source": lane.source, "sink": lane.sink}[side]
    closed.end.close("enough")
    assert closed.reports.failure() == "enough"
    return closed


@pytest.mark.parametrize("side", ["source", "sink"])
def test_close_in_the_middle_of_payloads_waits_for_nobody(patient_lane, side):
    started = MonotonicClock().now()
    _close_in_the_middle_of_payloads(patient_lane, side)
    assert MonotonicClock().now() - started < PATIENT_S / 2


@pytest.mark.parametrize("side", ["source", "sink"])
def test_close_in_the_middle_of_payloads_ends_both_ends_once(lane, side):
    closed = _close_in_the_middle_of_payloads(lane, side)
    lane.close()
    for each in {lane.source, lane.sink} - {closed}:
        assert each.reports.failure()
    assert closed.reports.silent_for(0.02)


def test_close_of_a_source_that_waits_for_credit(patient_lane):
    lane = patient_lane
    blocked = Blocked(lane, 1, 4000)
    lane.source.submit(1, 4000)
    for _ in range(BUFFERS):
        lane.source.reports.expect("sent")
    started = MonotonicClock().now()
    lane.source.end.close("enough")
    assert lane.source.reports.failure() == "enough"
    assert MonotonicClock().now() - started < PATIENT_S / 2
    blocked.release()


@pytest.mark.parametrize("side", ["source", "sink"])
@pytest.mark.parametrize("delay_s", [0.0, 0.02])
def test_close_while_building(make_transport, side, delay_s):
    """The other end is never opened."""
    transport = make_transport(timeout_s=PATIENT_S)
    at_source, at_sink = channel_pair(PATIENT_S)
    opened = SourceSide(BUFFER_BYTES) if side == "source" else SinkSide()
    opened.open(transport.factory, "alone", at_source if side == "source" else at_sink)
    threading.Event().wait(delay_s)
    started = MonotonicClock().now()
    opened.end.close("no session")
    assert opened.reports.failure() == "no session"
    assert MonotonicClock().now() - started < PATIENT_S / 2


def test_building_ends_in_time_without_a_peer(transport):
    at_source, _ = channel_pair(0.1)
    source = SourceSide(BUFFER_BYTES)
    source.open(transport.factory, "alone", at_source)
    assert "RuntimeError" in source.reports.failure()


def test_a_sink_that_gives_no_credit_ends_the_generation_in_time(lane):
    blocked = Blocked(lane, 1, 4000)
    lane.source.submit(1, 4000)
    started = MonotonicClock().now()
    assert "TimeoutError" in lane.source.reports.failure()
    assert MonotonicClock().now() - started > TIMEOUT_S / 2
    blocked.release()


def test_a_closed_peer_is_noticed_while_payloads_are_awaited(lane):
    lane.sink.expect(1, 4000)
    lane.source.submit(1, 4000)
    lane.sink.reports.expect("took")
    lane.sink.end.close("gone")
    assert lane.source.reports.failure()


def test_generations_are_independent_and_the_next_one_works(transport):
    old = LanePair(transport.factory, BUFFER_BYTES, TIMEOUT_S, "old").build()
    new = LanePair(transport.factory, BUFFER_BYTES, TIMEOUT_S, "new").build()
    old.transfer(1, 3 * CHUNK_TOKENS)
    old.close()
    old.source.reports.failure()
    new.transfer(2, 3 * CHUNK_TOKENS)
    new.close()


def held_resources():
    """Descriptors, mapped rings, and threads of this test."""
    gc.collect()
    with open("/proc/self/maps") as maps:
        rings = sum("kvferry-ring" in line for line in maps)
    threads = sum(thread.name.startswith("leak-") for thread in threading.enumerate())
    return len(os.listdir("/proc/self/fd")), rings, threads


def test_fifty_generations_leave_nothing_behind(transport):
    warm = LanePair(transport.factory, BUFFER_BYTES, TIMEOUT_S, "leak").build()
    warm.close()
    warm.source.reports.failure()
    warm.sink.reports.failure()
    del warm
    wait_until(
        "the first one is gone",
        lambda: held_resources()[1:] == (0, 0),
        PATIENCE_S,
        state=held_resources,
    )
    before = held_resources()
    for number in range(50):
        pair = LanePair(transport.factory, BUFFER_BYTES, TIMEOUT_S, f"leak-{number}").build()
        pair.transfer(number, 2 * CHUNK_TOKENS)
        pair.close()
        pair.source.reports.failure()
        pair.sink.reports.failure()
    del pair
    wait_until(
        f"no more than {before} held",
        lambda: all(now <= then for now, then in zip(held_resources(), before, strict=True)),
        PATIENCE_S,
        state=held_resources,
    )


def test_link_threads_are_daemons(transport):
    # Those of links closed by earlier tests may still be on their way out.
    before = set(threading.enumerate())
    pair = LanePair(transport.factory, BUFFER_BYTES, TIMEOUT_S).build()
    threads = [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("lane-") and thread not in before
    ]
    pair.close()
    assert len(threads) == 2
    assert all(thread.daemon for thread in threads)


# --- what no real end says --------------------------------------------------------------------


HEADER = ChunkHeader(0, 1, Region(0, 1, 0, 2), 1, 0, is_last=False)


def receive_from_rogue(transport, *headers: bytes):
    """Why the sink's end ended, and how many payloads it took before."""
    at_source, at_sink = channel_pair(TIMEOUT_S)
    sink = SinkSide()
    sink.open(transport.factory, "receive", at_sink)
    at_source.lead_to(sink.end.on_signal)
    rogue = transport.rogue_source(transport.factory, at_source)
    sink.reports.expect("built")
    for header in headers:
        rogue.send(header)
    took = 0
    while (report := sink.reports.queue.get(timeout=PATIENCE_S))[0] == "took":
        took += 1
    assert report[0] == "failed"
    rogue.close()
    return report[1], took


def test_a_gap_in_the_sequence_ends_the_generation(transport):
    reason, took = receive_from_rogue(transport, HEADER.pack(), replace(HEADER, seq=2).pack())
    assert "payload 2 where 1 is next" in reason
    assert took == 1


def test_a_payload_sent_again_ends_the_generation(transport):
    reason, took = receive_from_rogue(transport, HEADER.pack(), HEADER.pack())
    assert "payload 0 where 1 is next" in reason
    assert took == 1


def test_a_length_beyond_the_buffer_ends_the_generation(transport):
    header = replace(HEADER, payload_bytes=BUFFER_BYTES + 1)
    reason, took = receive_from_rogue(transport, header.pack())
    assert f"payload 0 of {BUFFER_BYTES + 1} bytes" in reason
    assert took == 0


def test_a_header_of_nothing_ends_the_generation(transport):
    nothing = bytearray(HEADER.pack())
    nothing[24:32] = bytes(8)
    reason, took = receive_from_rogue(transport, bytes(nothing))
    assert "BadMessage: payload 0 of tokens and layers [0, 0, 0, 2]" in reason
    assert took == 0


def test_credit_for_buffers_that_do_not_exist_ends_the_generation(transport):
    at_source, at_sink = channel_pair(TIMEOUT_S)
    source = SourceSide(BUFFER_BYTES)
    source.open(transport.factory, "send", at_source)
    at_sink.lead_to(source.end.on_signal)
    rogue = transport.rogue_sink(transport.factory, at_sink)
    source.reports.expect("built")
    rogue.credit_too_much()
    assert "credit" in source.reports.failure()
    rogue.close()
