"""Protocol cores at given states, for tests."""

from __future__ import annotations

from kv_transfer.protocol.deadlines import build_deadlines
from kv_transfer.protocol.key import HandoffKey
from kv_transfer.protocol.messages import Busy, Complete, FirstToken, Grant, Ready, Received
from kv_transfer.protocol.sink import SinkCore
from kv_transfer.protocol.source import SourceCore
from kv_transfer.protocol.states import SinkState, SourceState
from kvferry.generation import OutputToken
from kvferry.ids import Attempt, Incarnation, RequestId

KEY = HandoffKey(RequestId("r1"), Attempt(1), Incarnation(11), Incarnation(22))
DEADLINES = build_deadlines(20.0)
LAYOUT = "layout"
PROMPT_TOKENS = 20
LAYERS = 4
CELLS = PROMPT_TOKENS * LAYERS
STREAM = 5
TOKENS = (OutputToken(7),)


def new_source(now_s: float = 0.0, samples: int = 1) -> SourceCore:
    return SourceCore(
        KEY,
        PROMPT_TOKENS,
        layout_hash=LAYOUT,
        num_layers=LAYERS,
        samples=samples,
        deadlines=DEADLINES,
        now_s=now_s,
    )


def new_sink(now_s: float = 0.0, samples: int = 1) -> SinkCore:
    return SinkCore(
        KEY,
        PROMPT_TOKENS,
        layout_hash=LAYOUT,
        samples=samples,
        deadlines=DEADLINES,
        now_s=now_s,
    )


def ready(**changes) -> Ready:
    fields = {"prompt_tokens": PROMPT_TOKENS, "layout_hash": LAYOUT, "hit_tokens": 0}
    return Ready(KEY, **fields | changes)


def grant(resume_at: int = 0) -> Grant:
    return Grant(KEY, resume_at, STREAM)


def complete(tokens: int = PROMPT_TOKENS, generation: int | None = 1) -> Complete:
    return Complete(KEY, tokens, generation)


def source_in(state: SourceState) -> SourceCore:
    """A source at time 0 that came to `state` the shortest way."""
    core = new_source()
    steps = {
        SourceState.QUEUED: [],
        SourceState.OFFERED: ["schedule"],
        SourceState.DEFERRED: ["schedule", "busy"],
        SourceState.STREAMING: ["schedule", "grant"],
        SourceState.COMPLETED: ["schedule", "grant", "finish"],
        SourceState.CLOSED: ["schedule", "grant", "finish", "received"],
        SourceState.ABORTED: ["abort"],
    }
    actions = {
        "schedule": lambda: core.scheduled(0, 0.0),
        "busy": lambda: core.on_message(Busy(KEY), 0.0),
        "grant": lambda: core.on_message(grant(), 0.0),
        "finish": lambda: core.finished(TOKENS, 0.0),
        "received": lambda: core.on_message(Received(KEY), 0.0),
        "abort": lambda: core.abort("test", 0.0),
    }
    for step in steps[state]:
        actions[step]()
    assert core.state is state
    return core


def sink_in(state: SinkState) -> SinkCore:
    """A sink at time 0 that came to `state` the shortest way."""
    core = new_sink()
    receive = ["ready", "reserve", "tokens"]
    steps = {
        SinkState.REQUESTED: [],
        SinkState.RESERVING: ["ready"],
        SinkState.WAITING: ["ready", "refuse"],
        SinkState.RECEIVING: ["ready", "reserve"],
        SinkState.SETTLING: [*receive, "complete"],
        SinkState.ADOPTED: [*receive, "complete", "scatter"],
        SinkState.ABORTED: ["abort"],
    }
    actions = {
        "ready": lambda: core.on_message(ready(), 0.0),
        "reserve": lambda: core.reserved(0, STREAM, CELLS, 0.0),
        "refuse": lambda: core.refused(0.0),
        "tokens": lambda: core.on_message(FirstToken(KEY, TOKENS), 0.0),
        "complete": lambda: core.on_message(complete(), 0.0),
        "scatter": lambda: core.scattered(0, 0.0),
        "abort": lambda: core.abort("test", 0.0),
    }
    for step in steps[state]:
        actions[step]()
    assert core.state is state
    return core
