from __future__ import annotations

import mmap
import os

import pytest

from kv_transfer.links.shared_ring import SharedRing, new_ring_memory

PAGE = mmap.PAGESIZE


@pytest.fixture
def memory():
    fd = new_ring_memory(3, PAGE)
    yield fd
    os.close(fd)


def test_two_mappings_are_one_memory(memory):
    one, other = SharedRing(memory, 3, PAGE), SharedRing(memory, 3, PAGE)
    for index in range(3):
        one.buffer(index).fill_(index + 1)
    assert [int(other.buffer(index).sum()) for index in range(3)] == [PAGE, 2 * PAGE, 3 * PAGE]
    assert len(other) == 3


def test_a_buffer_need_not_be_whole_pages():
    fd = new_ring_memory(3, 100)
    ring = SharedRing(fd, 3, 100)
    os.close(fd)
    ring.buffer(1).fill_(7)
    assert int(ring.buffer(0).sum()) == int(ring.buffer(2).sum()) == 0


def test_its_memory_cannot_be_cut_off(memory):
    with pytest.raises(PermissionError):
        os.ftruncate(memory, PAGE)
    with pytest.raises(PermissionError):
        os.ftruncate(memory, 4 * PAGE)


def test_memory_that_can_be_cut_off_is_refused():
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 3 * PAGE)
    with pytest.raises(ValueError, match="cut off"):
        SharedRing(fd, 3, PAGE)
    os.close(fd)


@pytest.mark.parametrize("geometry", [(4, PAGE), (3, PAGE + 1), (0, PAGE), (3, 0)])
def test_another_geometry_is_refused(memory, geometry):
    with pytest.raises(ValueError, match=r"ring of|bytes for"):
        SharedRing(memory, *geometry)


def test_closing_unmaps(memory):
    ring = SharedRing(memory, 3, PAGE)
    assert _mappings() == 1
    ring.close()
    assert _mappings() == 0


def _mappings():
    with open("/proc/self/maps") as maps:
        return sum("kvferry-ring" in line for line in maps)
