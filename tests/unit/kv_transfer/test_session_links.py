"""The order in which a session's links and its messages begin and end."""

from __future__ import annotations

import pytest

from kv_transfer.incoming import ReceiveDesk
from kv_transfer.protocol.messages import LinkDown, LinkRendezvous
from kv_transfer.session_links import LinkCensus, LinkSettings, SessionLinks
from kvferry.clock import ManualClock


class FakeEnd:
    def __init__(self) -> None:
        self.closed: list[str] = []

    def close(self, reason: str) -> None:
        self.closed.append(reason)


class FakeFactory:
    def __init__(self) -> None:
        self.ends: list[FakeEnd] = []

    def open_sender(self, name, channel, queue, listener) -> FakeEnd:
        self.ends.append(FakeEnd())
        return self.ends[-1]


class FakeSession:
    """`send` goes round by the loop's queue; what is enqueued is on its way at once."""

    is_source = True

    def __init__(self) -> None:
        self.outbox: list[object] = []

    def enqueue(self, message) -> None:
        self.outbox.append(message)


@pytest.fixture
def factory():
    return FakeFactory()


@pytest.fixture
def session():
    return FakeSession()


@pytest.fixture
def links(session, factory):
    settings = LinkSettings({"memory": factory}, 5.0, print, ManualClock(), LinkCensus())
    return SessionLinks(session, ReceiveDesk(), settings)


def test_a_generation_is_announced_before_anything_the_engine_says_later(links, session):
    links.open_senders(1, "memory", [object(), object()])
    assert session.outbox == [
        LinkRendezvous(1, 0, "begin", b"memory"),
        LinkRendezvous(1, 1, "begin", b"memory"),
    ]
    links.close_generation(1, "enough")
    assert session.outbox[-1] == LinkDown(1, "enough")


def test_nothing_is_opened_on_a_lost_session(links, session, factory):
    links.open_senders(1, "memory", [object()])
    links.session_lost("cut")
    assert factory.ends[0].closed == ["cut"]
    links.open_senders(2, "memory", [object()])
    assert len(factory.ends) == 1
