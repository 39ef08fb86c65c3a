from __future__ import annotations

import pytest

from kv_transfer.transfer_rate import TransferRate


def test_unknown_before_the_first_stretch():
    assert TransferRate().bytes_per_s == 0


def test_a_steady_rate_is_met_whatever_the_stretches():
    rate = TransferRate()
    for seconds in (0.5, 2.0, 0.25):
        rate.add(int(1000 * seconds), seconds)
    assert rate.bytes_per_s == pytest.approx(1000)


def test_the_past_fades():
    rate = TransferRate()
    rate.add(1000, 1.0)
    for _ in range(30):
        rate.add(9000, 1.0)
    assert rate.bytes_per_s == pytest.approx(9000, rel=0.01)


def test_a_stretch_without_time_is_no_infinite_rate():
    rate = TransferRate()
    rate.add(1000, 0.0)
    assert rate.bytes_per_s == 0
    rate.add(1000, 1.0)
    assert rate.bytes_per_s < 2000
