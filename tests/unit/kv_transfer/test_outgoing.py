from __future__ import annotations

import threading
import zlib

import numpy as np
import pytest
import torch

from kv_transfer.outgoing import OutgoingStream, SendQueue
from kv_transfer.protocol.lanes import Heads
from kv_transfer.protocol.region import Region
from kvferry.config import KvDType
from mem_cache.layout import KvLayout
from mem_cache.mha_pool import MHATokenToKVPool

LAYOUT = KvLayout(num_layers=4, num_kv_heads=2, head_dim=4, dtype=KvDType.FLOAT32, page_size=4)
CELL = 2 * 2 * 4 * 4
BUFFER_BYTES = 6 * CELL


@pytest.fixture
def pool():
    pool = MHATokenToKVPool(LAYOUT, 64)
    pool.buffer.view(-1).copy_(torch.arange(pool.buffer.numel()))
    return pool


@pytest.fixture
def queue():
    return SendQueue(BUFFER_BYTES, checksums=False)


@pytest.fixture
def out():
    return torch.zeros(BUFFER_BYTES, dtype=torch.uint8)


def new_stream(pool, number=1):
    return OutgoingStream(number, pool, Heads(0, 2))


def headers(queue, out):
    found = []
    while (header := queue.next_chunk(len(found), out)) is not None:
        found.append(header)
    return found


def test_a_region_leaves_in_payloads_that_fit_a_buffer(queue, pool, out):
    stream = new_stream(pool)
    assert queue.submit(stream, Region(8, 17, 1, 3), np.arange(20, 29)) == 18 * CELL
    found = headers(queue, out)
    regions = [header.region for header in found]
    assert regions == [Region(8, 11, 1, 3), Region(11, 14, 1, 3), Region(14, 17, 1, 3)]
    assert [header.payload_bytes for header in found] == [6 * CELL] * 3
    assert [header.is_last for header in found] == [False, False, True]
    assert [header.seq for header in found] == [0, 1, 2]
    assert stream.unsent_bytes == 0


def test_the_payload_is_what_the_slots_hold(queue, pool, out):
    slots = np.array([9, 30, 5])
    queue.submit(new_stream(pool), Region(0, 3, 1, 3), slots)
    queue.next_chunk(0, out)
    held = pool.buffer[1:3][:, :, slots]
    assert torch.equal(out.view(torch.float32).view(held.shape), held)


def test_streams_take_turns(queue, pool, out):
    for number in (1, 2):
        queue.submit(new_stream(pool, number), Region(0, 9, 0, 2), np.arange(9))
    assert [header.stream for header in headers(queue, out)] == [1, 2, 1, 2, 1, 2]


def test_work_is_announced_to_the_lane(queue, pool):
    told = []
    queue.on_work = lambda: told.append(queue.has_work)
    assert not queue.has_work
    queue.submit(new_stream(pool), Region(0, 1, 0, 1), np.arange(1))
    assert told == [True]


def test_what_is_left_of_a_closed_stream_never_leaves(queue, pool, out):
    stream, other = new_stream(pool, 1), new_stream(pool, 2)
    queue.submit(stream, Region(0, 9, 0, 2), np.arange(9))
    queue.submit(other, Region(0, 3, 0, 2), np.arange(3))
    assert queue.next_chunk(0, out).stream == 1
    assert queue.close_stream(stream) == 12 * CELL
    assert [header.stream for header in headers(queue, out)] == [2]
    assert queue.close_stream(stream) == 0
    with pytest.raises(AssertionError, match="closed"):
        queue.submit(stream, Region(0, 1, 0, 1), np.arange(1))


def test_closing_waits_for_the_copy_that_reads_the_slots(queue, pool, out):
    reading, may_end, gather = threading.Event(), threading.Event(), pool.gather

    def slow(*arguments):
        reading.set()
        assert may_end.wait(60)
        return gather(*arguments)

    pool.gather = slow
    stream = new_stream(pool)
    queue.submit(stream, Region(0, 3, 0, 2), np.arange(3))
    lane = threading.Thread(target=queue.next_chunk, args=(0, out))
    lane.start()
    assert reading.wait(60)
    closing = threading.Thread(target=queue.close_stream, args=(stream,))
    closing.start()
    closing.join(0.02)
    assert closing.is_alive()
    may_end.set()
    for thread in (lane, closing):
        thread.join(60)
        assert not thread.is_alive()


def test_checksums_are_of_the_payload(pool, out):
    queue = SendQueue(BUFFER_BYTES, checksums=True)
    queue.submit(new_stream(pool), Region(0, 2, 0, 1), np.arange(2))
    header = queue.next_chunk(0, out)
    assert header.checksum == zlib.crc32(out[: 2 * CELL].numpy().tobytes())
