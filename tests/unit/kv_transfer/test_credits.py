from __future__ import annotations

import pytest

from kv_transfer.protocol.credits import ReceiveWindow, SendWindow
from kv_transfer.protocol.errors import BadMessage


def test_a_payload_costs_one_credit():
    window = SendWindow(3)
    window.credit(2)
    assert [window.take(), window.take()] == [0, 1]
    with pytest.raises(AssertionError, match="without credit"):
        window.take()
    window.credit(3)
    assert window.take() == 2


@pytest.mark.parametrize("buffers", [0, -1, 3])
def test_credit_is_positive_and_never_more_than_there_are_buffers(buffers):
    window = SendWindow(3)
    window.credit(1)
    with pytest.raises(BadMessage, match="credit of"):
        window.credit(buffers)
    assert window.credits == 1


def test_payloads_come_in_sequence_as_many_as_were_granted():
    window = ReceiveWindow()
    window.grant(2)
    window.take(0)
    for seq in (0, 2):
        with pytest.raises(BadMessage, match="where 1 is next"):
            window.take(seq)
    window.take(1)
    with pytest.raises(BadMessage, match="without credit"):
        window.take(2)
    window.grant(1)
    window.take(2)
