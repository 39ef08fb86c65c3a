"""How long each state may last, and whose move ends it. One row per live state.

The numbers are related: whoever waits for the peer waits longer than the peer may take, so that
the side that knows the reason is the side that speaks. `check_deadlines` states the relations.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from kv_transfer.protocol.states import LinkState, SinkState, SourceState

if TYPE_CHECKING:
    from collections.abc import Mapping


class Owner(Enum):
    """Whose move it is: who has to act for the state to end."""

    SOURCE_HOST = "the source's scheduler"
    SOURCE = "the source"
    SINK_HOST = "the sink's pools"
    SINK = "the sink"
    LINK = "the link thread"


@dataclass(frozen=True, slots=True)
class StateDeadline:
    """A state's owner and its longest duration in seconds."""

    owner: Owner
    timeout_s: float
    renewed_by_progress: bool = False
    """True: every payload or computed token starts the time anew."""


REOFFER_FIRST_S = 0.02
REOFFER_MAX_S = 0.5
"""Backoff between offers to a busy sink doubles from the first to the last value."""

OFFER_WINDOW_S = 30.0
"""Longest time from the first offer to a grant, all refusals included."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """The deadline table of one worker."""

    source: Mapping[SourceState, StateDeadline]
    sink: Mapping[SinkState, StateDeadline]
    link: Mapping[LinkState, StateDeadline]


def build_deadlines(link_timeout_s: float) -> Deadlines:
    """The table for a given longest wait for one payload on the link."""
    settling_s = link_timeout_s + 10.0
    table = Deadlines(
        source={
            SourceState.QUEUED: StateDeadline(Owner.SOURCE_HOST, 300.0),
            SourceState.OFFERED: StateDeadline(Owner.SINK, OFFER_WINDOW_S),
            SourceState.DEFERRED: StateDeadline(Owner.SOURCE, OFFER_WINDOW_S),
            SourceState.STREAMING: StateDeadline(Owner.SOURCE_HOST, 60.0, True),
            SourceState.COMPLETED: StateDeadline(Owner.SINK, settling_s + 10.0, True),
        },
        sink={
            SinkState.REQUESTED: StateDeadline(Owner.SOURCE, 330.0),
            SinkState.RESERVING: StateDeadline(Owner.SINK_HOST, 5.0),
            SinkState.WAITING: StateDeadline(Owner.SOURCE, OFFER_WINDOW_S + 10.0),
            SinkState.RECEIVING: StateDeadline(Owner.SOURCE, 90.0, True),
            SinkState.SETTLING: StateDeadline(Owner.LINK, settling_s, True),
        },
        link={
            LinkState.BUILDING: StateDeadline(Owner.LINK, link_timeout_s),
            LinkState.IDLE: StateDeadline(Owner.SOURCE, 600.0),
            LinkState.BUSY: StateDeadline(Owner.LINK, link_timeout_s, True),
        },
    )
    check_deadlines(table)
    return table


def check_deadlines(table: Deadlines) -> None:
    """Raise `AssertionError` where a side would give up before its peer had to act."""
    source, sink = table.source, table.sink
    assert sink[SinkState.REQUESTED].timeout_s > source[SourceState.QUEUED].timeout_s
    assert sink[SinkState.WAITING].timeout_s > source[SourceState.DEFERRED].timeout_s
    assert sink[SinkState.RECEIVING].timeout_s > source[SourceState.STREAMING].timeout_s
    assert source[SourceState.COMPLETED].timeout_s > sink[SinkState.SETTLING].timeout_s
    assert sink[SinkState.SETTLING].timeout_s > table.link[LinkState.BUSY].timeout_s
    assert source[SourceState.OFFERED].timeout_s > sink[SinkState.RESERVING].timeout_s
    assert table.link[LinkState.IDLE].timeout_s > source[SourceState.STREAMING].timeout_s
