"""The NCCL link on a group that is none: its calls, their order, their tensors."""

from __future__ import annotations

import threading
from queue import SimpleQueue

import pytest
import torch

from kv_transfer.chunk_header import HEADER_BYTES
from kv_transfer.links.nccl import NcclLinkFactory
from kv_transfer.links.staging import StagingRing
from tests.support.lanes import LAYOUT, LanePair

BUFFERS, BUFFER_BYTES, TIMEOUT_S = 3, 1024, 0.5
CHUNK_TOKENS = BUFFER_BYTES // LAYOUT.bytes_per_token


class Operation:
    """Like NCCL's: `wait` is the stream's wait. Here the copy is made by whoever comes second."""

    def __init__(self, tensor) -> None:
        self.tensor = tensor
        self.is_waited_for = False
        self.is_done = threading.Event()

    def wait(self) -> None:
        self.is_waited_for = True


class Meeting:
    """Sends and receives of a direction, matched in order."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sends, self.receives = [], []
        self.matched = 0

    def add(self, operations, operation) -> None:
        with self.lock:
            operations.append(operation)
            while self.matched < min(len(self.sends), len(self.receives)):
                send, receive = self.sends[self.matched], self.receives[self.matched]
                assert send.tensor.shape == receive.tensor.shape, "NCCL wants equal counts"
                assert send.tensor.dtype == receive.tensor.dtype == torch.uint8
                receive.tensor.copy_(send.tensor)
                send.is_done.set()
                receive.is_done.set()
                self.matched += 1


class Group:
    def __init__(self, meeting, rank, device) -> None:
        self.meeting, self.rank, self.device = meeting, rank, device
        self.aborted = 0

    def send(self, tensors, peer, tag):
        assert (self.rank, peer, tag) == (0, 1, 0)
        return self._post(self.meeting.sends, tensors)

    def recv(self, tensors, peer, tag):
        assert (self.rank, peer, tag) == (1, 0, 0)
        return self._post(self.meeting.receives, tensors)

    def abort(self) -> None:
        self.aborted += 1

    def _post(self, operations, tensors):
        operation = Operation(*tensors)
        self.device.stream().append(operation)
        self.meeting.add(operations, operation)
        return operation


class Mark:
    def __init__(self, operations) -> None:
        self.operations = operations

    def query(self) -> bool:
        assert all(operation.is_waited_for for operation in self.operations)
        return all(operation.is_done.is_set() for operation in self.operations)


class HostDevice:
    """Stands for a CUDA device; operations of a thread are its stream."""

    def __init__(self) -> None:
        self.meeting = Meeting()
        self.groups = SimpleQueue()
        self._threads = threading.local()

    def begin_thread(self) -> None:
        self._threads.stream = []

    def stream(self):
        return self._threads.stream

    def mark(self):
        return Mark(tuple(self.stream()))

    def ring(self, count, buffer_bytes):
        return StagingRing(count, buffer_bytes)

    def group(self, store, rank, timeout_s):
        group = Group(self.meeting, rank, self)
        self.groups.put(group)
        return group

    def tensor(self, content):
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)


@pytest.fixture
def device():
    return HostDevice()


@pytest.fixture
def lane(device):
    factory = NcclLinkFactory(TIMEOUT_S, BUFFERS, BUFFER_BYTES, device)
    pair = LanePair(factory, BUFFER_BYTES, TIMEOUT_S).build()
    yield pair
    pair.close()


def test_header_then_payload_both_as_large_as_what_is_received(device, lane):
    lane.transfer(1, 7 * CHUNK_TOKENS + 1)
    sizes = [operation.tensor.numel() for operation in device.meeting.sends]
    assert sizes == 7 * [HEADER_BYTES, BUFFER_BYTES] + [HEADER_BYTES, LAYOUT.bytes_per_token]
    assert [operation.tensor.numel() for operation in device.meeting.receives] == sizes
    lane.transfer(2, 3)


def test_nothing_is_received_ahead(device, lane):
    lane.transfer(1, 1)
    assert len(device.meeting.receives) == 2
    assert lane.sink.reports.silent_for(0.02)
    assert len(device.meeting.receives) == 2


def test_a_payload_that_does_not_pass_ends_the_link_in_time(device, lane):
    device.meeting.matched = 10**6
    lane.source.submit(1, 1)
    assert "TimeoutError" in lane.source.reports.failure()
    assert "TimeoutError" in lane.sink.reports.failure()
    assert device.groups.get().aborted == device.groups.get().aborted == 1


def test_close_wakes_an_end_that_waits_for_a_payload_and_aborts_its_group(device, lane):
    device.meeting.matched = 10**6
    lane.source.submit(1, 1)
    assert lane.sink.reports.silent_for(0.02)
    lane.sink.end.close("enough")
    assert lane.sink.reports.failure(TIMEOUT_S / 2) == "enough"
    groups = {group.rank: group for group in (device.groups.get(), device.groups.get())}
    assert groups[1].aborted > 0
