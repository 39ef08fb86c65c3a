from __future__ import annotations

import pytest

from kv_transfer.protocol.deadlines import build_deadlines
from kv_transfer.protocol.errors import BadMessage, IllegalEvent
from kv_transfer.protocol.link import ReceivingLinkCore, SendingLinkCore
from kv_transfer.protocol.states import LinkState

DEADLINES = build_deadlines(20.0)


@pytest.fixture
def sending():
    core = SendingLinkCore(1, DEADLINES, 0.0)
    core.built(0.0)
    return core


@pytest.fixture
def receiving():
    core = ReceivingLinkCore(1, DEADLINES, 0.0)
    core.built(0.0)
    core.grant(2)
    return core


def test_a_payload_costs_one_credit(sending):
    assert not sending.can_send
    sending.credit(2)
    assert [sending.post(0.0), sending.post(0.0)] == [0, 1]
    assert not sending.can_send
    with pytest.raises(AssertionError, match="without credit"):
        sending.post(0.0)


def test_busy_until_the_last_payload_is_done(sending):
    sending.credit(2)
    sending.post(0.0)
    sending.post(0.0)
    sending.completed(1.0)
    assert sending.state is LinkState.BUSY
    sending.completed(2.0)
    assert sending.state is LinkState.IDLE


def test_credit_must_be_positive(sending):
    with pytest.raises(BadMessage):
        sending.credit(0)


def test_nothing_is_sent_while_building():
    core = SendingLinkCore(1, DEADLINES, 0.0)
    core.credit(3)
    assert not core.can_send


def test_headers_come_in_sequence_and_doubled_ones_are_ignored(receiving):
    assert receiving.announce(0, 0.0)
    assert not receiving.announce(0, 0.0)
    assert receiving.announce(1, 0.0)


def test_a_gap_and_a_header_without_credit_are_refused(receiving):
    with pytest.raises(BadMessage, match="after -1"):
        receiving.announce(1, 0.0)
    receiving.announce(0, 0.0)
    receiving.announce(1, 0.0)
    with pytest.raises(BadMessage, match="without credit"):
        receiving.announce(2, 0.0)


def test_each_state_goes_down_at_its_deadline(sending):
    assert sending.on_time(599.9) is None
    assert "idle" in sending.on_time(600.0)
    assert sending.state is LinkState.DOWN
    building = SendingLinkCore(1, DEADLINES, 0.0)
    assert "building" in building.on_time(20.0)


def test_progress_renews_the_deadline_of_a_busy_link(sending):
    sending.credit(3)
    for _ in range(3):
        sending.post(0.0)
    sending.completed(15.0)
    assert sending.on_time(30.0) is None
    assert "busy" in sending.on_time(35.0)


def test_down_is_for_good(sending):
    sending.failed(0.0)
    sending.failed(0.0)
    assert sending.wakes_at is None
    with pytest.raises(IllegalEvent):
        sending.built(0.0)
