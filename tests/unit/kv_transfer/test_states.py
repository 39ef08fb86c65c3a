"""The tables as such: every state is owned, bounded, reachable and can be left."""

from __future__ import annotations

import pytest

from kv_transfer.protocol import states
from kv_transfer.protocol.deadlines import Owner, build_deadlines, check_deadlines

TABLE = build_deadlines(link_timeout_s=20.0)

MACHINES = {
    "source": (
        states.SourceState,
        states.SourceEvent,
        states.SOURCE_TRANSITIONS,
        states.SOURCE_TERMINAL,
        TABLE.source,
    ),
    "sink": (
        states.SinkState,
        states.SinkEvent,
        states.SINK_TRANSITIONS,
        states.SINK_TERMINAL,
        TABLE.sink,
    ),
    "link": (
        states.LinkState,
        states.LinkEvent,
        states.LINK_TRANSITIONS,
        states.LINK_TERMINAL,
        TABLE.link,
    ),
    "session": (
        states.SessionState,
        states.SessionEvent,
        states.SESSION_TRANSITIONS,
        states.SESSION_TERMINAL,
        None,
    ),
}

each_machine = pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)

TIMED = {name: machine for name, machine in MACHINES.items() if name != "session"}
"""A session's time limits are gRPC's and asyncio's: it ends by `broken` like any other end."""

each_timed_machine = pytest.mark.parametrize("machine", TIMED.values(), ids=TIMED)


@each_timed_machine
def test_every_live_state_has_an_owner_and_a_deadline(machine):
    all_states, _, _, terminal, deadlines = machine
    assert set(deadlines) == set(all_states) - terminal
    for deadline in deadlines.values():
        assert isinstance(deadline.owner, Owner)
        assert 0 < deadline.timeout_s < float("inf")


@each_timed_machine
def test_every_live_state_ends_at_its_deadline(machine):
    all_states, events, transitions, terminal, _ = machine
    for state in set(all_states) - terminal:
        assert transitions[state, events["DEADLINE"]] in terminal


@each_machine
def test_nothing_leaves_a_terminal_state(machine):
    _, _, transitions, terminal, _ = machine
    assert not [pair for pair in transitions if pair[0] in terminal]


@each_machine
def test_every_state_is_reachable_and_every_event_is_used(machine):
    all_states, events, transitions, _, _ = machine
    first = next(iter(all_states))
    reached, frontier = {first}, [first]
    while frontier:
        state = frontier.pop()
        for (start, _), target in transitions.items():
            if start is state and target not in reached:
                reached.add(target)
                frontier.append(target)
    assert reached == set(all_states)
    duplicates = {event for _, event in states.SOURCE_DUPLICATES | states.SINK_DUPLICATES}
    assert set(events) <= {event for _, event in transitions} | duplicates


@pytest.mark.parametrize("side", ["source", "sink"])
def test_a_handoff_can_be_aborted_from_either_side_and_lost_in_every_state(side):
    all_states, events, transitions, terminal, _ = MACHINES[side]
    for state in set(all_states) - terminal:
        for name in ("ABORT_RECEIVED", "ABORT_LOCAL", "SESSION_LOST"):
            assert transitions[state, events[name]] in terminal, (state, name)


def test_an_event_is_never_both_a_transition_and_a_duplicate():
    assert not states.SOURCE_DUPLICATES & states.SOURCE_TRANSITIONS.keys()
    assert not states.SINK_DUPLICATES & states.SINK_TRANSITIONS.keys()


@pytest.mark.parametrize("link_timeout_s", [0.5, 20.0])
def test_deadlines_hold_their_relations(link_timeout_s):
    check_deadlines(build_deadlines(link_timeout_s))
