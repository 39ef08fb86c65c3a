from __future__ import annotations

import threading
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from kv_transfer.chunk_header import ChunkHeader
from kv_transfer.incoming import ChunkFate, IncomingLane, IncomingStream, ReceiveDesk
from kv_transfer.protocol.coverage import Coverage
from kv_transfer.protocol.lanes import Heads
from kv_transfer.protocol.region import Region
from kvferry.config import KvDType
from mem_cache.layout import KvLayout
from mem_cache.mha_pool import MHATokenToKVPool

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=4, dtype=KvDType.FLOAT32, page_size=4)
CELL = 2 * 2 * 4 * 4
START, TOKENS = 4, 6
SLOTS = np.array([12, 13, 30, 31, 8, 9])
HEADER = ChunkHeader(0, 1, Region(START, START + 3, 0, 2), 6 * CELL, 0, is_last=False)
PAYLOAD = torch.arange(6 * CELL // 4, dtype=torch.float32).add(1).view(torch.uint8)


@pytest.fixture
def pool():
    return MHATokenToKVPool(LAYOUT, 64)


@pytest.fixture
def stream(pool):
    lane = IncomingLane(pool, Heads(0, 2), Coverage(START, START + TOKENS, 2))
    return IncomingStream(1, SLOTS, START, {0: lane})


@pytest.fixture
def desk(stream):
    desk = ReceiveDesk()
    desk.expect(stream)
    return desk


def test_a_payload_goes_into_the_slots_of_its_tokens(desk, pool):
    taken = desk.take(0, HEADER, PAYLOAD)
    assert (taken.fate, taken.remaining) == (ChunkFate.SCATTERED, 6)
    assert taken.moved_bytes == 6 * CELL
    held = pool.buffer[:, :, SLOTS[:3]]
    assert torch.equal(held, PAYLOAD.view(torch.float32).view(held.shape))
    assert int(pool.buffer.count_nonzero()) == PAYLOAD.numel() // 4
    rest = replace(HEADER, seq=1, region=Region(START + 3, START + 6, 0, 2))
    taken = desk.take(0, rest, PAYLOAD)
    # What is counted last says everything, whichever lane's report is read first.
    assert (taken.remaining, taken.moved_bytes) == (0, 12 * CELL)
    assert pool.buffer[:, :, SLOTS].all()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"region": Region(START - 1, START + 2, 0, 2)}, "were granted"),
        ({"region": Region(START + 4, START + 7, 0, 2)}, "were granted"),
        ({"region": Region(START, START + 3, 0, 3)}, "were granted"),
        ({"region": Region(START, START + 3, 1, 2)}, "what comes next"),
        ({"payload_bytes": 5 * CELL}, "bytes for"),
        ({"region": Region(START, START + 2, 0, 2)}, "bytes for"),
        ({"checksum": 7}, "checksum"),
    ],
)
def test_what_the_handoff_may_not_get_is_rejected_and_ends_it(desk, pool, change, why):
    taken = desk.take(0, replace(HEADER, **change), PAYLOAD)
    assert taken.fate is ChunkFate.REJECTED
    assert why in taken.reason
    assert desk.take(0, HEADER, PAYLOAD).fate is ChunkFate.DROPPED
    assert not pool.buffer.any()


def test_a_payload_on_a_lane_of_others_is_rejected(desk):
    assert "lane 1" in desk.take(1, HEADER, PAYLOAD).reason


def test_the_same_payload_twice_is_rejected(desk):
    desk.take(0, HEADER, PAYLOAD)
    assert desk.take(0, replace(HEADER, seq=1), PAYLOAD).fate is ChunkFate.REJECTED


def test_a_good_checksum_is_taken(desk):
    header = replace(HEADER, checksum=zlib.crc32(PAYLOAD.numpy().tobytes()))
    assert desk.take(0, header, PAYLOAD).fate is ChunkFate.SCATTERED


def test_payloads_of_ended_and_unknown_handoffs_are_dropped(desk, stream, pool):
    assert desk.take(0, replace(HEADER, stream=2), PAYLOAD).fate is ChunkFate.DROPPED
    desk.forget(stream)
    assert desk.take(0, HEADER, PAYLOAD).fate is ChunkFate.DROPPED
    assert not pool.buffer.any()
    desk.forget(stream)


def test_forgetting_waits_for_the_copy_that_writes_the_slots(desk, stream, pool):
    writing, may_end, scatter = threading.Event(), threading.Event(), pool.scatter

    def slow(*arguments):
        writing.set()
        assert may_end.wait(60)
        scatter(*arguments)

    pool.scatter = slow
    lane = threading.Thread(target=desk.take, args=(0, HEADER, PAYLOAD))
    lane.start()
    assert writing.wait(60)
    forgetting = threading.Thread(target=desk.forget, args=(stream,))
    forgetting.start()
    forgetting.join(0.02)
    assert forgetting.is_alive()
    may_end.set()
    for thread in (lane, forgetting):
        thread.join(60)
        assert not thread.is_alive()
