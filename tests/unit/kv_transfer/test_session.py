"""A session over a fake stream: greeting, order, bounds, and its one end."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from kv_transfer import session as session_module
from kv_transfer.events import MessageCame, SessionLost, SessionOpened
from kv_transfer.protocol.messages import Busy, Hello, LinkRendezvous
from kv_transfer.protocol.states import SessionState
from kv_transfer.session import Session
from kv_transfer.session_links import LinkCensus, LinkSettings
from kv_transfer.wire import batch_from_wire, batch_to_wire
from kvferry.clock import MonotonicClock
from kvferry.ids import Incarnation, WorkerId
from kvferry.rpc.v1 import handoff_pb2 as pb
from tests.support.handoff_cores import KEY
from tests.support.memory_link import MemoryLinkFactory

OURS = Hello(WorkerId("here"), Incarnation(1), "layout", 64, heads=4)
THEIRS = Hello(WorkerId("there"), Incarnation(2), "layout", 64, heads=4)


class FakeStream:
    """The peer is a list of messages, then silence or the end."""

    def __init__(self, *incoming, is_open=False, reads_nothing=False) -> None:
        self.incoming = [batch_to_wire([message]) for message in incoming]
        self.is_open = is_open
        self.reads_nothing = reads_nothing
        self.written = []

    async def read(self):
        if self.incoming:
            return self.incoming.pop(0)
        if self.is_open:
            await asyncio.Event().wait()
        return grpc.aio.EOF

    async def write(self, message) -> None:
        if self.reads_nothing and self.written:
            await asyncio.Event().wait()
        self.written += batch_from_wire(message)


def converse(stream, act=None):
    """Run a session to its end; what it posted."""
    events = []

    async def go():
        session = Session(
            OURS,
            expected=THEIRS.incarnation,
            loop=asyncio.get_running_loop(),
            links=LinkSettings(
                factories={"memory": MemoryLinkFactory(1.0, 1, 64)},
                timeout_s=1.0,
                post=events.append,
                clock=MonotonicClock(),
                census=LinkCensus(),
            ),
        )
        running = asyncio.create_task(session.run(stream))
        await asyncio.sleep(0)
        if act is not None:
            act(session)
        await asyncio.wait_for(running, 60)
        return session

    session = asyncio.run(go())
    assert session.state is SessionState.LOST
    assert isinstance(events[-1], SessionLost)
    assert sum(isinstance(event, SessionLost) for event in events) == 1
    return events


def test_greets_first_and_posts_in_order():
    stream = FakeStream(THEIRS, Busy(KEY))
    opened, message, lost = converse(stream)
    assert stream.written[0] == OURS
    assert isinstance(opened, SessionOpened)
    assert opened.peer == THEIRS
    assert isinstance(message, MessageCame)
    assert message.message == Busy(KEY)
    assert "ended the session" in lost.reason


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        ((), "without a greeting"),
        ((Busy(KEY),), "began with Busy"),
        ((Hello(WorkerId("there"), Incarnation(3), "layout", 64, heads=4),), "incarnation 3"),
        ((Hello(WorkerId("there"), Incarnation(2), "other", 64, heads=4),), "KV layout other"),
        ((Hello(WorkerId("there"), Incarnation(2), "layout", 64, heads=4, ranks=3),), "3 ranks"),
        ((Hello(WorkerId("there"), Incarnation(2), "layout", 64, heads=4, ranks=0),), "0 ranks"),
    ],
)
def test_a_wrong_greeting_ends_it_before_it_opened(first, reason):
    (lost,) = converse(FakeStream(*first))
    assert reason in lost.reason


def test_a_silent_peer_ends_it_in_time(monkeypatch):
    monkeypatch.setattr(session_module, "SESSION_CONNECT_TIMEOUT_S", 0.02)
    (lost,) = converse(FakeStream(is_open=True))
    assert "no greeting within 0.02 s" in lost.reason


def test_a_message_of_no_known_kind_ends_it():
    stream = FakeStream(THEIRS)
    stream.incoming.append(pb.HandoffBatch(messages=[pb.HandoffMessage()]))
    assert "kind None" in converse(stream)[-1].reason


def test_a_link_generation_of_zero_ends_it():
    reason = converse(FakeStream(THEIRS, LinkRendezvous(0, 0, "begin", b"memory")))[-1].reason
    assert "generations count from 1" in reason


@pytest.mark.parametrize(("lane", "transport"), [(1, b"memory"), (0, b"pigeons"), (0, b"\xff")])
def test_a_lane_that_cannot_be_ends_it(lane, transport):
    reason = converse(FakeStream(THEIRS, LinkRendezvous(1, lane, "begin", transport)))[-1].reason
    assert f"lane {lane} of 1" in reason


def test_messages_are_written_in_order_and_close_ends_it():
    stream = FakeStream(THEIRS, is_open=True)
    sent = [Busy(KEY)] * 3

    def act(session):
        for message in sent:
            session.send(message)
        asyncio.get_running_loop().call_later(0.05, session.close, "enough")

    assert converse(stream, act)[-1].reason == "enough"
    assert stream.written == [OURS, *sent]


def test_a_peer_that_does_not_read_is_given_up(monkeypatch):
    monkeypatch.setattr(session_module, "SESSION_OUTBOX_MAX", 5)
    stream = FakeStream(THEIRS, is_open=True, reads_nothing=True)

    def act(session):
        for _ in range(20):
            session.send(Busy(KEY))

    assert "unread" in converse(stream, act)[-1].reason
