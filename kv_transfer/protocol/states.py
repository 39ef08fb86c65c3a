"""The transition tables: what is legal, for source, sink, link and session.

Theory of operation. Each handoff has one core per side. A core turns a message, a call of its
host or the passing of time into one *event*, looks up `(state, event)` in its table and returns
effects. Three outcomes:

* the pair is in `*_TRANSITIONS`: the state changes and effects follow;
* the pair is in `*_DUPLICATES`: a repeated message, counted, without effect;
* neither: `IllegalEvent` is raised and nothing has changed. The driver answers an illegal
  message by aborting that one handoff.

An event whose outcome depends on data is split until the table alone decides: `DRAINED` and
`SETTLED` are raised by a core itself, right after the event that made them true.

`docs/handoff.md` shows these tables as diagrams; a test keeps the two equal.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias, TypeVar

State = TypeVar("State", bound=Enum)
Event = TypeVar("Event", bound=Enum)
Table: TypeAlias = dict[tuple[State, Event], State]


# --- source: the side that computes the prompt -----------------------------------------------


class SourceState(Enum):
    """Where a handoff stands at the side that computes the prompt."""

    QUEUED = "queued"
    """Accepted; waits for the scheduler. Holds no KV."""
    OFFERED = "offered"
    """Scheduled, slots pinned, `Ready` sent; computing goes on."""
    DEFERRED = "deferred"
    """The sink had no room; the offer is repeated with backoff."""
    STREAMING = "streaming"
    """Granted: what is computed is handed to the link, layer by layer."""
    COMPLETED = "completed"
    """Everything is with the link; the sink's receipt is outstanding, the pin stays."""
    CLOSED = "closed"
    ABORTED = "aborted"


class SourceEvent(Enum):
    """What can happen to a handoff at its source."""

    SCHEDULED = "scheduled"
    GRANT = "grant"
    BUSY = "busy"
    OFFER_DUE = "offer due"
    COMPUTED = "computed"
    FINISHED = "finished"
    SENT = "sent"
    DRAINED = "drained"
    RECEIVED = "received"
    ABORT_RECEIVED = "abort received"
    ABORT_LOCAL = "abort local"
    LINK_LOST = "link lost"
    SESSION_LOST = "session lost"
    DEADLINE = "deadline"


_S, _SE = SourceState, SourceEvent

SOURCE_TRANSITIONS: Table[SourceState, SourceEvent] = {
    (_S.QUEUED, _SE.SCHEDULED): _S.OFFERED,
    (_S.OFFERED, _SE.COMPUTED): _S.OFFERED,
    (_S.OFFERED, _SE.FINISHED): _S.OFFERED,
    (_S.OFFERED, _SE.GRANT): _S.STREAMING,
    (_S.OFFERED, _SE.BUSY): _S.DEFERRED,
    (_S.DEFERRED, _SE.COMPUTED): _S.DEFERRED,
    (_S.DEFERRED, _SE.FINISHED): _S.DEFERRED,
    (_S.DEFERRED, _SE.OFFER_DUE): _S.OFFERED,
    # A doubled Busy can defer an offer that the sink has granted meanwhile.
    (_S.DEFERRED, _SE.GRANT): _S.STREAMING,
    (_S.STREAMING, _SE.COMPUTED): _S.STREAMING,
    (_S.STREAMING, _SE.FINISHED): _S.STREAMING,
    (_S.STREAMING, _SE.SENT): _S.STREAMING,
    (_S.STREAMING, _SE.DRAINED): _S.COMPLETED,
    (_S.STREAMING, _SE.LINK_LOST): _S.ABORTED,
    (_S.COMPLETED, _SE.SENT): _S.COMPLETED,
    (_S.COMPLETED, _SE.RECEIVED): _S.CLOSED,
    # Whether the payload arrived is the sink's to say: it answers Received or Abort.
    (_S.COMPLETED, _SE.LINK_LOST): _S.COMPLETED,
    # The receipt may have been lost with the session; either way nobody needs the pin now.
    (_S.COMPLETED, _SE.SESSION_LOST): _S.CLOSED,
    **{
        (state, event): _S.ABORTED
        for state in (_S.QUEUED, _S.OFFERED, _S.DEFERRED, _S.STREAMING, _S.COMPLETED)
        for event in (_SE.ABORT_RECEIVED, _SE.ABORT_LOCAL, _SE.DEADLINE)
    },
    **{
        (state, _SE.SESSION_LOST): _S.ABORTED
        for state in (_S.QUEUED, _S.OFFERED, _S.DEFERRED, _S.STREAMING)
    },
}

SOURCE_DUPLICATES: frozenset[tuple[SourceState, SourceEvent]] = frozenset(
    {
        (_S.STREAMING, _SE.GRANT),
        (_S.COMPLETED, _SE.GRANT),
        (_S.DEFERRED, _SE.BUSY),
        (_S.STREAMING, _SE.BUSY),
        (_S.COMPLETED, _SE.BUSY),
    }
)

SOURCE_TERMINAL = frozenset({_S.CLOSED, _S.ABORTED})
SOURCE_PINNED = frozenset({_S.OFFERED, _S.DEFERRED, _S.STREAMING, _S.COMPLETED})


# --- sink: the side that decodes -------------------------------------------------------------


class SinkState(Enum):
    """Where a handoff stands at the side that decodes."""

    REQUESTED = "requested"
    """`Prefill` sent. Holds no KV."""
    RESERVING = "reserving"
    """`Ready` came; the host is asked for slots."""
    WAITING = "waiting"
    """No room; `Busy` sent, the source will ask again. Holds no KV."""
    RECEIVING = "receiving"
    """Slots reserved (inbound); payloads are scattered into them."""
    SETTLING = "settling"
    """`Complete` came; payloads are still on their way."""
    ADOPTED = "adopted"
    ABORTED = "aborted"


class SinkEvent(Enum):
    """What can happen to a handoff at its sink."""

    READY = "ready"
    RESERVED = "reserved"
    REFUSED = "refused"
    SCATTERED = "scattered"
    FIRST_TOKEN = "first token"
    FIRST_TOKEN_AGAIN = "first token again"
    COMPLETE = "complete"
    SETTLED = "settled"
    ABORT_RECEIVED = "abort received"
    ABORT_LOCAL = "abort local"
    LINK_LOST = "link lost"
    SESSION_LOST = "session lost"
    DEADLINE = "deadline"


_K, _KE = SinkState, SinkEvent

SINK_TRANSITIONS: Table[SinkState, SinkEvent] = {
    (_K.REQUESTED, _KE.READY): _K.RESERVING,
    (_K.RESERVING, _KE.RESERVED): _K.RECEIVING,
    (_K.RESERVING, _KE.REFUSED): _K.WAITING,
    (_K.WAITING, _KE.READY): _K.RESERVING,
    (_K.RECEIVING, _KE.SCATTERED): _K.RECEIVING,
    (_K.RECEIVING, _KE.FIRST_TOKEN): _K.RECEIVING,
    (_K.RECEIVING, _KE.COMPLETE): _K.SETTLING,
    (_K.RECEIVING, _KE.LINK_LOST): _K.ABORTED,
    (_K.SETTLING, _KE.SCATTERED): _K.SETTLING,
    (_K.SETTLING, _KE.SETTLED): _K.ADOPTED,
    (_K.SETTLING, _KE.LINK_LOST): _K.ABORTED,
    **{
        (state, event): _K.ABORTED
        for state in (_K.REQUESTED, _K.RESERVING, _K.WAITING, _K.RECEIVING, _K.SETTLING)
        for event in (
            _KE.ABORT_RECEIVED,
            _KE.ABORT_LOCAL,
            _KE.SESSION_LOST,
            _KE.DEADLINE,
        )
    },
}

SINK_DUPLICATES: frozenset[tuple[SinkState, SinkEvent]] = frozenset(
    {
        (_K.RESERVING, _KE.READY),
        (_K.RECEIVING, _KE.READY),
        (_K.SETTLING, _KE.READY),
        (_K.RECEIVING, _KE.FIRST_TOKEN_AGAIN),
        (_K.SETTLING, _KE.FIRST_TOKEN_AGAIN),
        (_K.SETTLING, _KE.COMPLETE),
    }
)

SINK_TERMINAL = frozenset({_K.ADOPTED, _K.ABORTED})
SINK_RESERVED = frozenset({_K.RECEIVING, _K.SETTLING})


# --- link generation, seen from either end ---------------------------------------------------


class LinkState(Enum):
    """One generation of a link."""

    BUILDING = "building"
    IDLE = "idle"
    """Up, with nothing in flight."""
    BUSY = "busy"
    """Payloads wait for credit or are under way."""
    DOWN = "down"
    """For good; the next handoff builds the next generation."""


class LinkEvent(Enum):
    """What can happen to a link generation."""

    BUILT = "built"
    POSTED = "posted"
    DONE = "done"
    ALL_DONE = "all done"
    FAILED = "failed"
    DEADLINE = "deadline"


_L, _LE = LinkState, LinkEvent

LINK_TRANSITIONS: Table[LinkState, LinkEvent] = {
    (_L.BUILDING, _LE.BUILT): _L.IDLE,
    (_L.IDLE, _LE.POSTED): _L.BUSY,
    (_L.BUSY, _LE.POSTED): _L.BUSY,
    (_L.BUSY, _LE.DONE): _L.BUSY,
    (_L.BUSY, _LE.ALL_DONE): _L.IDLE,
    **{
        (state, event): _L.DOWN
        for state in (_L.BUILDING, _L.IDLE, _L.BUSY)
        for event in (_LE.FAILED, _LE.DEADLINE)
    },
}

LINK_TERMINAL = frozenset({_L.DOWN})


# --- session ---------------------------------------------------------------------------------


class SessionState(Enum):
    """One gRPC stream between two workers."""

    CONNECTING = "connecting"
    GREETING = "greeting"
    """`Hello` sent, the peer's outstanding."""
    OPEN = "open"
    LOST = "lost"
    """For good; the next handoff opens another session."""


class SessionEvent(Enum):
    """What can happen to a session."""

    CONNECTED = "connected"
    GREETED = "greeted"
    BROKEN = "broken"
    """Closed by either side, cut off, or silent for too long."""


_N, _NE = SessionState, SessionEvent

SESSION_TRANSITIONS: Table[SessionState, SessionEvent] = {
    (_N.CONNECTING, _NE.CONNECTED): _N.GREETING,
    (_N.GREETING, _NE.GREETED): _N.OPEN,
    **{(state, _NE.BROKEN): _N.LOST for state in (_N.CONNECTING, _N.GREETING, _N.OPEN)},
}

SESSION_TERMINAL = frozenset({_N.LOST})
