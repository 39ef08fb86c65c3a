from __future__ import annotations

import pytest

from kv_transfer.protocol.deadlines import OFFER_WINDOW_S
from kv_transfer.protocol.effects import (
    Commit,
    DeliverFirstTokens,
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
    CELLS,
    DEADLINES,
    KEY,
    PROMPT_TOKENS,
    STREAM,
    TOKENS,
    complete,
    new_sink,
    ready,
    sink_in,
)

LIVE = [state for state in SinkState if state not in SINK_TERMINAL]
COMMIT = (Commit(PROMPT_TOKENS), Send(Received(KEY)), NotifyAdopted())


def test_normal_course_commits_only_when_every_cell_is_scattered():
    core = new_sink()
    assert core.on_message(ready(hit_tokens=8, host_hit_tokens=4), 0.0) == (Reserve(PROMPT_TOKENS),)
    assert core.reserved(4, STREAM, 64, 0.0) == (Send(Grant(KEY, 4, STREAM)),)
    assert core.scattered(40, 0.0) == ()
    assert core.on_message(FirstToken(KEY, TOKENS), 0.0) == (DeliverFirstTokens(TOKENS),)
    assert core.scattered(24, 0.0) == ()
    assert core.on_message(complete(), 0.0) == ()
    assert core.state is SinkState.SETTLING
    assert core.scattered(0, 0.0) == COMMIT
    assert core.state is SinkState.ADOPTED
    assert (core.hit_tokens, core.host_hit_tokens) == (8, 4)
    assert core.wakes_at is None


def test_full_hit_commits_at_complete():
    core = new_sink()
    core.on_message(ready(), 0.0)
    core.reserved(PROMPT_TOKENS, STREAM, 0, 0.0)
    core.on_message(FirstToken(KEY, TOKENS), 0.0)
    assert core.on_message(complete(generation=None), 0.0) == COMMIT


def test_payloads_that_overtake_the_messages_are_enough():
    core = sink_in(SinkState.RECEIVING)
    assert core.scattered(0, 0.0) == ()
    core.on_message(FirstToken(KEY, TOKENS), 0.0)
    assert core.on_message(complete(), 0.0) == COMMIT


def test_a_part_is_taken_where_only_what_is_held_is_wanted():
    core = new_sink(samples=0)
    assert core.on_message(ready(prompt_tokens=12), 0.0) == (Reserve(12),)
    core.reserved(12, STREAM, 0, 0.0)
    effects = core.on_message(complete(12, None), 0.0)
    assert effects == (Commit(12), Send(Received(KEY)), NotifyAdopted())


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


def test_tokens_must_agree():
    core = sink_in(SinkState.RECEIVING)
    core.on_message(FirstToken(KEY, TOKENS), 0.0)
    with pytest.raises(BadMessage, match="complete with"):
        core.on_message(complete(16), 0.0)
    assert core.state is SinkState.RECEIVING


def test_something_must_carry_what_is_missing():
    core = sink_in(SinkState.RECEIVING)
    core.on_message(FirstToken(KEY, TOKENS), 0.0)
    with pytest.raises(BadMessage, match="no link"):
        core.on_message(complete(generation=None), 0.0)


def test_no_success_without_a_first_token():
    core = sink_in(SinkState.RECEIVING)
    core.scattered(0, 0.0)
    with pytest.raises(BadMessage, match="first tokens here: False"):
        core.on_message(complete(), 0.0)


@pytest.mark.parametrize("count", [0, 2])
def test_one_first_token_for_each_sample(count):
    core = sink_in(SinkState.RECEIVING)
    with pytest.raises(BadMessage, match=f"{count} first tokens for 1"):
        core.on_message(FirstToken(KEY, TOKENS * count), 0.0)
    assert core.first_tokens_at is None


def test_more_cells_than_were_missing_are_our_own_bug():
    core = sink_in(SinkState.RECEIVING)
    with pytest.raises(AssertionError, match="left"):
        core.scattered(CELLS + 1, 0.0)


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


def _provoke(core, event):
    """Cause `event` from outside; None for those that need data or that only the core raises."""
    return {
        SinkEvent.READY: lambda: core.on_message(ready(), 0.0),
        SinkEvent.RESERVED: lambda: core.reserved(0, STREAM, CELLS, 0.0),
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
