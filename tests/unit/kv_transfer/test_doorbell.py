from __future__ import annotations

import select
import threading

import pytest

from kv_transfer.links.doorbell import Doorbell


@pytest.fixture
def doorbell():
    bell = Doorbell()
    yield bell
    bell.close()


def rings(bell, within_s=0.0):
    return bool(select.select([bell], [], [], within_s)[0])


def test_it_rings_until_it_is_answered(doorbell):
    assert not rings(doorbell)
    doorbell.ring()
    doorbell.ring()
    assert rings(doorbell)
    assert rings(doorbell)
    doorbell.answer()
    assert not rings(doorbell)


def test_it_wakes_a_thread(doorbell):
    timer = threading.Timer(0.02, doorbell.ring)
    timer.start()
    assert rings(doorbell, 5.0)
    timer.join()


def test_ringing_a_closed_one_reaches_nobody():
    bell = Doorbell()
    fd = bell.fileno()
    bell.close()
    other = Doorbell()
    assert other.fileno() == fd
    bell.ring()
    assert not rings(other)
    with pytest.raises(AssertionError, match="closed"):
        bell.fileno()
    other.close()
