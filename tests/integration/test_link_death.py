"""Processes at the other end of a lane that are killed or stopped: what the survivor's end does."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from kvferry.clock import MonotonicClock
from tests.support.link_child import START_S, TIMEOUT_S, RemoteLane, start_child
from tests.support.waiting import wait_until

PAYLOADS = 50
"""Of 32 MB each: more than passes before the child is killed or stopped."""
SLACK_S = 30.0
"""For a busy machine."""


class Pair:
    """One end here, the other one in a child."""

    def __init__(self, transport: str, child_role: str) -> None:
        self.child_role = child_role
        self.child, connection = start_child(transport, child_role)
        self.here = RemoteLane(
            transport, "sink" if child_role == "source" else "source", connection
        )
        self.thread = threading.Thread(target=self.here.listen, daemon=True)
        self.thread.start()
        self.reports = self.here.side.reports

    def make_busy(self) -> None:
        """Payloads of megabytes, one after the other, until something happens to the child."""
        if self.child_role == "source":
            self.here.tell("send for ever")
            for _ in range(5):
                self.reports.expect("took")
        else:
            for number in range(PAYLOADS):
                self.here.side.submit(number, 4000)
            for _ in range(5):
                self.reports.expect("sent")

    def send(self, signal_number: int) -> None:
        os.kill(self.child.pid, signal_number)

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        self.thread.join()
        self.here.connection.close()
        self.here.side.end.close("test ends")


@pytest.fixture(params=["gloo", "shared_memory"])
def transport(request):
    return request.param


@pytest.fixture(params=["source", "sink"])
def pair(transport, request):
    pair = Pair(transport, request.param)
    try:
        pair.reports.expect("built", START_S)
        yield pair
    finally:
        pair.close()


def failure_within(pair, bound_s):
    started = MonotonicClock().now()
    reason = pair.reports.failure(bound_s + SLACK_S)
    assert MonotonicClock().now() - started < bound_s + SLACK_S
    return reason


def test_a_peer_stopped_for_a_moment_then_killed_in_the_middle_of_payloads(pair):
    pair.make_busy()
    pair.send(signal.SIGSTOP)
    threading.Event().wait(TIMEOUT_S / 4)
    pair.send(signal.SIGCONT)
    for _ in range(20):
        pair.reports.expect("took" if pair.child_role == "source" else "sent")
    pair.send(signal.SIGKILL)
    assert failure_within(pair, TIMEOUT_S)
    assert pair.reports.silent_for(0.05)


def test_a_peer_killed_at_rest(pair, transport):
    """Gloo tells when it is used next; until then the session's break does."""
    pair.send(signal.SIGKILL)
    pair.child.wait()
    if transport == "shared_memory":
        assert "the peer has closed the connection or is gone" in failure_within(pair, 0.0)
        return
    assert pair.reports.silent_for(0.1)
    if pair.child_role == "sink":
        pair.here.side.submit(1, 4000)
        assert failure_within(pair, TIMEOUT_S)
    else:
        pair.here.side.end.close("session lost")
        assert failure_within(pair, 0.0) == "session lost"


@pytest.mark.slow
def test_a_stopped_peer(pair):
    pair.make_busy()
    pair.send(signal.SIGSTOP)
    if pair.child_role == "sink":
        assert failure_within(pair, 2 * TIMEOUT_S)
        return
    wait_until("no payload comes any more", lambda: pair.reports.silent_for(0.1), TIMEOUT_S)
    pair.here.side.end.close("deadline of the handoff")
    assert failure_within(pair, TIMEOUT_S) == "deadline of the handoff"
