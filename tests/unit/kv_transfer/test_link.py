from __future__ import annotations

import pytest

from kv_transfer.protocol.errors import IllegalEvent
from kv_transfer.protocol.link import LinkCore
from kv_transfer.protocol.states import LinkState
from tests.support.handoff_cores import DEADLINES


@pytest.fixture
def link():
    core = LinkCore(1, DEADLINES, 0.0)
    core.built(0.0)
    return core


def test_busy_until_the_last_byte_is_done(link):
    link.posted(60, 0.0)
    link.posted(40, 0.0)
    link.done(60, 1.0)
    assert link.state is LinkState.BUSY
    link.done(40, 2.0)
    assert link.state is LinkState.IDLE
    assert link.used_at == 2.0


def test_what_waits_while_it_is_built_makes_it_busy():
    core = LinkCore(1, DEADLINES, 0.0)
    core.posted(10, 0.0)
    assert core.state is LinkState.BUILDING
    core.built(1.0)
    assert core.state is LinkState.BUSY


def test_nothing_done_is_no_progress(link):
    link.posted(10, 0.0)
    link.done(0, 15.0)
    assert "busy" in link.on_time(20.0)


def test_more_than_was_posted_cannot_be_done(link):
    link.posted(10, 0.0)
    with pytest.raises(AssertionError, match="more was done"):
        link.done(11, 0.0)


def test_each_state_goes_down_at_its_deadline(link):
    assert link.on_time(599.9) is None
    assert "idle" in link.on_time(600.0)
    assert link.state is LinkState.DOWN
    building = LinkCore(1, DEADLINES, 0.0)
    assert "building" in building.on_time(20.0)


def test_progress_renews_the_deadline_of_a_busy_link_and_more_work_does_not(link):
    link.posted(30, 0.0)
    link.done(10, 15.0)
    link.posted(30, 30.0)
    assert link.on_time(34.9) is None
    assert "busy" in link.on_time(35.0)


def test_down_is_for_good(link):
    link.failed(0.0)
    link.failed(0.0)
    assert link.wakes_at is None
    with pytest.raises(IllegalEvent):
        link.built(0.0)
