from __future__ import annotations

import pytest

from kv_transfer.protocol.deadlines import OFFER_WINDOW_S
from kv_transfer.protocol.effects import (
    Commit,
    DeliverFirstToken,
    NotifyAdopted,
    NotifyFailed,
    Reserve,
    Send,
)
from kv_transfer.protocol.errors import BadMessage, IllegalEvent
from kv_transfer.protocol.messages import (
    Abort,
    Aborted,
    Busy,
    Complete,
    FirstToken,
    Grant,
    Received,
)
from kv_transfer.protocol.states import (
    SINK_DUPLICATES,
    SINK_TERMINAL,
    SINK_TRANSITIONS,
    SinkEvent,
    SinkState,
)
from tests.support.handoff_cores import (
    DEADLINES,
    KEY,
    PROMPT_TOKENS,
    TOKEN,
    chunk,
    new_sink,
    ready,
    sink_in,
)

LIVE = [state for state in SinkState if state not in SINK_TERMINAL]
COMMIT = (Commit(PROMPT_TOKENS), Send(Received(KEY)), NotifyAdopted())


def test_normal_course_commits_only_when_every_payload_is_scattered():
    core = new_sink()
    assert core.on_message(ready(hit_tokens=8, host_hit_tokens=4), 0.0) == (Reserve(PROMPT_TOKENS),)
    assert core.reserved(4, 0.0) == (Send(Grant(KEY, 4)),)
    assert core.on_message(chunk(4, 10), 0.0) == ()
    assert core.on_message(FirstToken(KEY, TOKEN), 0.0) == (DeliverFirstToken(TOKEN),)
    assert core.on_message(chunk(10, 20, seq=1), 0.0) == ()
    assert core.scattered(0.0) == ()
    assert core.on_message(Complete(KEY, 20, 2), 0.0) == ()
    assert core.state is SinkState.SETTLING
    assert core.scattered(0.0) == COMMIT
    assert core.state is SinkState.ADOPTED
    assert (core.hit_tokens, core.host_hit_tokens) == (8, 4)
    assert core.wakes_at is None


def test_full_hit_commits_at_complete():
    core = new_sink()
    core.on_message(ready(), 0.0)
    core.reserved(PROMPT_TOKENS, 0.0)
    core.on_message(FirstToken(KEY, TOKEN), 0.0)
    assert core.on_message(Complete(KEY, PROMPT_TOKENS, 0), 0.0) == COMMIT


def test_refusals_share_one_window():
    core, now = new_sink(), 0.0
    while core.state is not SinkState.ABORTED and now < 1000:
        if core.on_message(ready(), now):
            assert core.refused(now) == (Send(Busy(KEY)),)
        now += 0.5
        core.on_time(now)
    assert OFFER_WINDOW_S < now <= DEADLINES.sink[SinkState.WAITING].timeout_s + 0.5


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (ready(layout_hash="other"), "layout other"),
        (ready(prompt_tokens=PROMPT_TOKENS + 1), "prompt tokens"),
    ],
)
def test_an_offer_that_differs_is_refused_before_anything_is_reserved(message, text):
    core = new_sink()
    with pytest.raises(BadMessage, match=text):
        core.on_message(message, 0.0)
    assert core.state is SinkState.REQUESTED


@pytest.mark.parametrize(
    "bad",
    [
        chunk(4, 8),  # a gap
        chunk(0, 0),
        chunk(0, PROMPT_TOKENS + 1),
    ],
)
def test_a_chunk_out_of_place_changes_nothing(bad):
    core = sink_in(SinkState.RECEIVING)
    with pytest.raises(BadMessage):
        core.on_message(bad, 0.0)
    assert core.chunks_announced == 0


def test_chunks_of_two_link_generations_are_refused():
    core = sink_in(SinkState.RECEIVING)
    core.on_message(chunk(0, 4), 0.0)
    with pytest.raises(BadMessage, match="two link generations"):
        core.on_message(chunk(4, 8, generation=2), 0.0)


@pytest.mark.parametrize("complete", [Complete(KEY, 20, 2), Complete(KEY, 16, 1)])
def test_counts_must_agree(complete):
    core = sink_in(SinkState.RECEIVING)
    core.on_message(FirstToken(KEY, TOKEN), 0.0)
    core.on_message(chunk(0, PROMPT_TOKENS), 0.0)
    with pytest.raises(BadMessage, match="complete with"):
        core.on_message(complete, 0.0)


def test_no_success_without_a_first_token():
    core = sink_in(SinkState.RECEIVING)
    core.on_message(chunk(0, PROMPT_TOKENS), 0.0)
    with pytest.raises(BadMessage, match="first token here: False"):
        core.on_message(Complete(KEY, PROMPT_TOKENS, 1), 0.0)


@pytest.mark.parametrize("state", LIVE)
def test_the_sources_abort_is_answered_and_fails_the_request(state):
    core = sink_in(state)
    effects = core.on_message(Abort(KEY, "gpu on fire"), 0.0)
    assert core.state is SinkState.ABORTED
    assert effects[0] == Send(Aborted(KEY))
    assert "gpu on fire" in effects[1].reason


@pytest.mark.parametrize("state", LIVE)
def test_own_abort_does_not_tell_the_host(state):
    core = sink_in(state)
    assert core.abort("client left", 0.0) == (Send(Abort(KEY, "client left")),)
    assert core.state is SinkState.ABORTED


@pytest.mark.parametrize("state", LIVE)
def test_session_loss_fails_at_once(state):
    core = sink_in(state)
    (effect,) = core.session_lost("broken", 0.0)
    assert isinstance(effect, NotifyFailed)
    assert core.state is SinkState.ABORTED


@pytest.mark.parametrize("state", LIVE)
def test_deadline(state):
    core = sink_in(state)
    timeout = DEADLINES.sink[state].timeout_s
    assert core.on_time(timeout - 0.01) == ()
    effects = core.on_time(timeout)
    assert core.state is SinkState.ABORTED
    assert state.value in effects[-1].reason


@pytest.mark.parametrize("state", SinkState)
def test_payloads_are_taken_only_into_reserved_slots(state):
    taken = sink_in(state).takes_payload
    assert taken == (state in (SinkState.RECEIVING, SinkState.SETTLING))


def _provoke(core, event):
    """Cause `event` from outside; None for those that need data or that only the core raises."""
    return {
        SinkEvent.READY: lambda: core.on_message(ready(), 0.0),
        SinkEvent.RESERVED: lambda: core.reserved(0, 0.0),
        SinkEvent.REFUSED: lambda: core.refused(0.0),
        SinkEvent.ABORT_RECEIVED: lambda: core.on_message(Abort(KEY, "x"), 0.0),
        SinkEvent.ABORT_LOCAL: lambda: core.abort("x", 0.0),
        SinkEvent.LINK_LOST: lambda: core.link_lost("x", 0.0),
        SinkEvent.SESSION_LOST: lambda: core.session_lost("x", 0.0),
    }.get(event)


@pytest.mark.parametrize("state", SinkState)
@pytest.mark.parametrize("event", SinkEvent)
def test_the_table_alone_decides(state, event):
    core = sink_in(state)
    action = _provoke(core, event)
    if action is None:
        return
    before = dict(vars(core))
    if (state, event) in SINK_TRANSITIONS:
        action()
        assert core.state is SINK_TRANSITIONS[state, event]
    elif (state, event) in SINK_DUPLICATES:
        assert action() == ()
        assert core.duplicates == 1
        assert core.state is state
    else:
        with pytest.raises(IllegalEvent):
            action()
        assert dict(vars(core)) == before
