from __future__ import annotations

import pytest

from kv_transfer.protocol.deadlines import OFFER_WINDOW_S, REOFFER_FIRST_S, REOFFER_MAX_S
from kv_transfer.protocol.effects import (
    NotifyCancelled,
    NotifyClosed,
    Pin,
    Send,
    SendComplete,
    Stream,
    Unpin,
)
from kv_transfer.protocol.errors import BadMessage, IllegalEvent
from kv_transfer.protocol.messages import (
    Abort,
    Aborted,
    Busy,
    Closed,
    FirstToken,
    Received,
)
from kv_transfer.protocol.region import Region
from kv_transfer.protocol.states import (
    SOURCE_DUPLICATES,
    SOURCE_PINNED,
    SOURCE_TERMINAL,
    SOURCE_TRANSITIONS,
    SourceEvent,
    SourceState,
)
from tests.support.handoff_cores import (
    DEADLINES,
    KEY,
    LAYERS,
    PROMPT_TOKENS,
    STREAM,
    TOKENS,
    grant,
    new_source,
    ready,
    source_in,
)

LIVE = [state for state in SourceState if state not in SOURCE_TERMINAL]
TELL_TOKENS = Send(FirstToken(KEY, TOKENS))
DONE = SendComplete(PROMPT_TOKENS)


def test_normal_course():
    core = new_source()
    offer = ready(hit_tokens=8, host_hit_tokens=4)
    assert core.scheduled(8, 0.0, host_hit_tokens=4) == (Pin(), Send(offer))
    assert core.computed(10, 0.0) == ()
    assert core.on_message(grant(4), 0.0) == (Stream(Region(4, 10, 0, LAYERS)),)
    assert core.stream == STREAM
    assert core.computed(16, 0.0) == (Stream(Region(10, 16, 0, LAYERS)),)
    rest = Stream(Region(16, 20, 0, LAYERS))
    assert core.finished(TOKENS, 0.0) == (TELL_TOKENS, rest, DONE)
    assert core.state is SourceState.COMPLETED
    closing = (Unpin(), Send(Closed(KEY)), NotifyClosed())
    assert core.on_message(Received(KEY), 0.0) == closing
    assert core.state is SourceState.CLOSED
    assert core.wakes_at is None


def test_layers_leave_while_the_step_is_at_work():
    core = source_in(SourceState.STREAMING)
    assert core.computing(8, 1, 0.0) == (Stream(Region(0, 8, 0, 1)),)
    assert core.computing(8, 1, 0.0) == ()
    assert core.computing(8, 3, 0.0) == (Stream(Region(0, 8, 1, 3)),)
    assert core.computed(8, 0.0) == (Stream(Region(0, 8, 3, LAYERS)),)
    assert core.computing(20, 2, 0.0) == (Stream(Region(8, 20, 0, 2)),)
    assert core.finished(TOKENS, 0.0) == (TELL_TOKENS, Stream(Region(8, 20, 2, LAYERS)), DONE)


def test_layers_of_what_the_sink_has_do_not_leave():
    core = source_in(SourceState.OFFERED)
    core.on_message(grant(12), 0.0)
    assert core.computing(8, 2, 0.0) == ()
    assert core.computed(8, 0.0) == ()
    assert core.computing(16, 2, 0.0) == (Stream(Region(12, 16, 0, 2)),)
    assert core.computed(16, 0.0) == (Stream(Region(12, 16, 2, LAYERS)),)


def test_nothing_leaves_before_the_grant():
    core = source_in(SourceState.OFFERED)
    assert core.computing(8, 2, 0.0) == ()
    assert core.computed(8, 0.0) == ()
    assert core.finished(TOKENS, 0.0) == ()
    assert core.on_message(grant(), 0.0) == (
        TELL_TOKENS,
        Stream(Region(0, PROMPT_TOKENS, 0, LAYERS)),
        DONE,
    )


def test_full_hit_completes_without_a_payload():
    core = source_in(SourceState.OFFERED)
    core.on_message(grant(PROMPT_TOKENS), 0.0)
    assert core.finished(TOKENS, 0.0) == (TELL_TOKENS, DONE)


def test_what_is_held_is_offered_and_sent_without_a_token():
    core = new_source(samples=0)
    offer = ready(prompt_tokens=12, hit_tokens=12)
    assert core.held(12, 0.0) == (Pin(), Send(offer))
    assert core.on_message(grant(4), 0.0) == (Stream(Region(4, 12, 0, LAYERS)), SendComplete(12))


def test_one_first_token_for_each_sample():
    core = new_source(samples=2)
    core.scheduled(0, 0.0)
    with pytest.raises(AssertionError, match="1 first tokens"):
        core.finished(TOKENS, 0.0)
    core.finished(TOKENS * 2, 0.0)
    assert core.on_message(grant(), 0.0)[0] == Send(FirstToken(KEY, TOKENS * 2))


def test_a_busy_sink_is_asked_again_with_growing_pauses_within_one_window():
    core, now, pauses = source_in(SourceState.OFFERED), 0.0, []
    while core.state is not SourceState.ABORTED:
        if core.state is SourceState.OFFERED:
            assert core.on_message(Busy(KEY), now) == ()
        due = core.wakes_at
        pauses.append(due - now)
        now = due
        core.on_time(now)
    assert pauses[0] == pytest.approx(REOFFER_FIRST_S)
    assert max(pauses) == pytest.approx(REOFFER_MAX_S)
    assert now == pytest.approx(OFFER_WINDOW_S)


@pytest.mark.parametrize("resume_at", [-4, PROMPT_TOKENS + 1])
def test_a_grant_beyond_the_prompt_changes_nothing(resume_at):
    core = source_in(SourceState.OFFERED)
    with pytest.raises(BadMessage):
        core.on_message(grant(resume_at), 0.0)
    assert core.state is SourceState.OFFERED


@pytest.mark.parametrize("state", LIVE)
def test_abort_from_the_sink_unpins_answers_and_tells_the_host(state):
    core = source_in(state)
    effects = core.on_message(Abort(KEY, "enough"), 0.0)
    assert core.state is SourceState.ABORTED
    assert (Unpin() in effects) == (state in SOURCE_PINNED)
    assert Send(Aborted(KEY)) in effects
    assert [type(effect) for effect in effects if isinstance(effect, NotifyCancelled)]


@pytest.mark.parametrize("state", LIVE)
def test_own_abort_does_not_tell_the_host(state):
    core = source_in(state)
    effects = core.abort("model failed", 0.0)
    assert core.state is SourceState.ABORTED
    assert Send(Abort(KEY, "model failed")) in effects
    assert not [effect for effect in effects if isinstance(effect, NotifyCancelled)]


@pytest.mark.parametrize("state", LIVE)
def test_session_loss_ends_at_once(state):
    core = source_in(state)
    effects = core.session_lost("broken", 0.0)
    assert core.state in SOURCE_TERMINAL
    assert not [effect for effect in effects if isinstance(effect, Send)]
    if state is SourceState.COMPLETED:
        assert effects == (Unpin(), NotifyClosed())
    else:
        assert isinstance(effects[-1], NotifyCancelled)


@pytest.mark.parametrize("state", LIVE)
def test_deadline(state):
    core = source_in(state)
    timeout = DEADLINES.source[state].timeout_s
    if state is not SourceState.DEFERRED:
        assert core.on_time(timeout - 0.01) == ()
    effects = core.on_time(timeout)
    assert core.state is SourceState.ABORTED
    assert state.value in effects[-1].reason


def test_progress_renews_the_deadline_while_streaming():
    core = source_in(SourceState.STREAMING)
    core.computed(4, 50.0)
    assert core.on_time(100.0) == ()
    assert core.wakes_at == 50.0 + DEADLINES.source[SourceState.STREAMING].timeout_s


def test_link_loss_after_everything_was_sent_is_the_sinks_to_judge():
    core = source_in(SourceState.COMPLETED)
    assert core.link_lost("cut", 0.0) == ()
    assert core.on_message(Received(KEY), 0.0)[-1] == NotifyClosed()


def _provoke(core, event):
    """Cause `event` from outside; None for events that only the core raises."""
    return {
        SourceEvent.SCHEDULED: lambda: core.scheduled(0, 0.0),
        SourceEvent.GRANT: lambda: core.on_message(grant(), 0.0),
        SourceEvent.BUSY: lambda: core.on_message(Busy(KEY), 0.0),
        SourceEvent.COMPUTED: lambda: core.computed(core.computed_tokens, 0.0),
        SourceEvent.RECEIVED: lambda: core.on_message(Received(KEY), 0.0),
        SourceEvent.ABORT_RECEIVED: lambda: core.on_message(Abort(KEY, "x"), 0.0),
        SourceEvent.ABORT_LOCAL: lambda: core.abort("x", 0.0),
        SourceEvent.LINK_LOST: lambda: core.link_lost("x", 0.0),
        SourceEvent.SESSION_LOST: lambda: core.session_lost("x", 0.0),
    }.get(event)


@pytest.mark.parametrize("state", SourceState)
@pytest.mark.parametrize("event", SourceEvent)
def test_the_table_alone_decides(state, event):
    core = source_in(state)
    action = _provoke(core, event)
    if action is None:
        return
    before = snapshot(core)
    if (state, event) in SOURCE_TRANSITIONS:
        action()
        assert core.state is SOURCE_TRANSITIONS[state, event]
    elif (state, event) in SOURCE_DUPLICATES:
        assert action() == ()
        assert core.duplicates == 1
        assert core.state is state
    else:
        with pytest.raises(IllegalEvent):
            action()
        assert snapshot(core) == before


def snapshot(core):
    return dict(vars(core))
