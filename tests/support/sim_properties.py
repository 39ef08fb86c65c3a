"""What must hold in every simulated run: one function per property, P1 to P8.

| property | says | looked at |
|---|---|---|
| P1 | slots are conserved on every worker | after every move that changed a cache |
| P2 | nothing is scattered into slots that the handoff does not own | at every scatter |
| P3 | slots are neither freed nor reused while a gather may read them | gathers, changes |
| P4 | nothing is readable before the commit | when KV is adopted; changes |
| P5 | each key ends exactly once on each side | at every end, and at the end of the run |
| P6 | everything ends within its deadlines, and all KV is given back | ticks; losses; the end |
| P7 | the sink's bytes are the source's | when KV is gathered, adopted and released |
| P8 | nothing old changes anything | when something old is said again |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kv_transfer.incoming import ChunkFate
from kv_transfer.protocol.messages import Grant
from kv_transfer.protocol.states import SINK_TERMINAL, SOURCE_TERMINAL, SinkState, SourceState
from tests.support.sim_pool import LAYERS
from tests.support.sim_violation import Violation, require

if TYPE_CHECKING:
    from kv_transfer.chunk_header import ChunkHeader
    from kv_transfer.incoming import TakenChunk
    from kv_transfer.protocol.key import HandoffKey
    from kv_transfer.protocol.messages import SessionMessage
    from mem_cache.request_kv import RequestKV
    from tests.support.sim_session import Pair, SimSession
    from tests.support.sim_worker import SimWorker
    from tests.support.sim_world import SimWorld

_SideKey = tuple[int, str, "HandoffKey"]
_TERMINAL = {state.value for state in (*SOURCE_TERMINAL, *SINK_TERMINAL)}
_WINDOWS = {"offered": "offer window", "deferred": "offer window"}
"""States that share one deadline, counted from the first of them."""
_RENEWED = {"streaming", "completed", "receiving", "settling"}


class Properties:
    """Watches a world. Knows what was said and copied; never asks the code under test for it."""

    def __init__(self, world: SimWorld) -> None:
        self.world = world
        self.keys_of_streams: dict[tuple[Pair, int], HandoffKey] = {}
        self.scattered: dict[HandoffKey, int] = {}
        """Cells (a token in a layer, of one lane) that came, by key."""
        self.states: dict[_SideKey, tuple[str, float]] = {}
        """State of each live handoff, and since when it may last."""
        self.outcomes: dict[_SideKey, str] = {}
        self.ends: dict[_SideKey, str] = {}

    # --- what is seen ---

    def said(self, end: SimSession, message: SessionMessage) -> None:
        """A message is on its way."""
        self.world.remember(message)
        if isinstance(message, Grant):
            stream = (end.pair, message.stream)
            known = self.keys_of_streams.setdefault(stream, message.key)
            require(known == message.key, f"P8: stream {message.stream} of {known} is used again")

    def gathered(
        self,
        worker: SimWorker,
        session: SimSession,
        header: ChunkHeader,
        payload: np.ndarray,
        lane: int,
    ) -> None:
        """A link thread has read KV."""
        key = self.keys_of_streams.get((session.pair, header.stream))
        if key is None:
            require(self.world.is_lying, f"P3: nobody has granted stream {header.stream}")
            return
        p3_only_pinned_slots_are_read(worker, key, session.lanes[lane].source_rank)
        p7_what_is_gathered_is_the_prompts(worker, key, header, payload, session.lanes[lane])
        self.world.say(f"{worker.name}: link gathers {_piece(header)} of {short(key)}")

    def took(self, worker: SimWorker, session: SimSession, taken: TakenChunk, lane: int) -> None:
        """A link thread has dealt with a payload."""
        header = taken.header
        self.world.say(f"{worker.name}: link has {_piece(header)}, {taken.fate.value}")
        if taken.fate is ChunkFate.SCATTERED:
            key = self.keys_of_streams[session.pair, header.stream]
            p2_only_own_slots_are_written(worker, key, header, session.lanes[lane].sink_rank)
            self.scattered[key] = self.scattered.get(key, 0) + header.region.cells
        require(
            taken.fate is not ChunkFate.REJECTED or self.world.is_anything_wild,
            f"P7: a payload was rejected: {taken.reason}",
        )

    def entered(self, worker: SimWorker, side: str, key: HandoffKey, state: str) -> None:
        """A handoff is in another state."""
        place = (worker.incarnation, side, key)
        self.world.say(f"{worker.name}: {side} of {short(key)} {state}")
        if state in _TERMINAL:
            require(place not in self.outcomes, f"P5: {side} of {key} has ended twice")
            self.outcomes[place] = state
            self.states.pop(place, None)
            if state == "closed":
                p5_closed_means_adopted(self, worker, key)
            return
        before = self.states.get(place)
        window = _WINDOWS.get(state, state)
        since = self.world.clock.now()
        if before is not None and (before[0] == window or state == "reserving"):
            since = before[1]
        self.states[place] = (window, since)

    def ended(self, worker: SimWorker, side: str, key: HandoffKey, how: str) -> None:
        """A host has been told, or has ended it itself."""
        place = (worker.incarnation, side, key)
        self.world.say(f"{worker.name}: host of {short(key)} hears: {how}")
        require(place not in self.ends, f"P5: the {side}'s host of {key} hears of two ends")
        self.ends[place] = how

    def adopted(self, worker: SimWorker, key: HandoffKey, usage: object) -> None:
        """The sink has committed."""
        p4_only_what_is_complete_is_adopted(self, worker, key)
        p7_the_sink_has_the_prompts_bytes(worker, key)
        del usage

    def read(self, worker: SimWorker, key: HandoffKey) -> None:
        """The sink has decoded from it; it is still the prompt's."""
        p7_the_sink_has_the_prompts_bytes(worker, key)

    def session_lost(self, worker: SimWorker, session: SimSession) -> None:
        """An engine has dealt with the end of a session."""
        p6_a_lost_session_ends_its_handoffs(worker, session)

    # --- when it is looked at ---

    def after_move(self) -> None:
        """After every move of anybody."""
        for worker in self.world.living:
            if worker.is_cache_changed:
                worker.is_cache_changed = False
                p1_slots_are_conserved(worker)
                p3_nothing_queued_is_free(worker)
                p4_inbound_stays_unreadable(worker)

    def after_tick(self) -> None:
        """After every driver that runs was told the time."""
        p6_no_state_outlasts_its_deadline(self)

    def at_the_end(self) -> None:
        """Everything has come to rest."""
        for worker in self.world.living:
            if not worker.is_frozen:
                p6_everything_is_given_back(worker)
        p5_everything_that_began_has_ended(self)


# --- the properties ------------------------------------------------------------------------------


def p1_slots_are_conserved(worker: SimWorker) -> None:
    """Every slot has one owner, rows and locks agree, the accounts add up."""
    worker.kv_cache.audit()


def p2_only_own_slots_are_written(
    worker: SimWorker, key: HandoffKey, header: ChunkHeader, rank: int
) -> None:
    """At a scatter: the slots are the inbound ones of this very handoff."""
    kv = _live(worker, key)
    require(kv is not None, f"P2: a payload of {key}, which has ended, was scattered")
    assert kv is not None
    require(kv.inbound, f"P2: a payload was scattered into {key} after it was adopted")
    copied = worker.pools[rank].copied
    assert copied is not None
    region = header.region
    owned = worker.kv_cache.slots(kv, region.token_start, region.token_stop)
    if not np.array_equal(copied.slots, owned):
        raise Violation(f"P2: slots {copied.slots} are not {key}'s")
    require(
        region.token_start >= kv.cache_protected_len, f"P2: shared prefix of {key} was written to"
    )


def p3_only_pinned_slots_are_read(worker: SimWorker, key: HandoffKey, rank: int) -> None:
    """At a gather: the request is live, pinned, and the slots are nobody else's."""
    kv = _live(worker, key)
    require(kv is not None, f"P3: slots of {key}, which has ended, were read")
    assert kv is not None
    require(kv.pins > 0, f"P3: slots of {key} were read without a pin")
    copied = worker.pools[rank].copied
    assert copied is not None
    free = worker.is_free(copied.slots)
    if free:
        raise Violation(f"P3: free slots {free} were read for {key}")


def p3_nothing_queued_is_free(worker: SimWorker) -> None:
    """After a change: no slot that a queued piece will be gathered from is free."""
    for end in worker.link_ends:
        for stream in end.queued_streams():
            for piece in stream.pieces:
                free = worker.is_free(piece.slots)
                if free and stream.is_open:
                    raise Violation(f"P3: slots {free} are free, and stream {stream.number} open")


def p4_only_what_is_complete_is_adopted(
    properties: Properties, worker: SimWorker, key: HandoffKey
) -> None:
    """At the commit: as many cells were scattered as were missing; and the tokens are known."""
    kv = worker.sink.kvs[key]
    require(not kv.inbound, f"P4: {key} is adopted and its KV still inbound")
    lanes = properties.world.lanes_between(key)
    missing = (kv.committed_len - kv.prefix_len) * LAYERS * lanes
    came = properties.scattered.get(key, 0)
    require(came == missing, f"P4: {key} is adopted with {came} of {missing} cells")
    held_only = properties.world.requests[key].held_only
    require(held_only or key in worker.sink.told, f"P4: {key} is adopted without its tokens")


def p4_inbound_stays_unreadable(worker: SimWorker) -> None:
    """Whatever is not adopted is inbound: never matched, published or read."""
    for key, kv in worker.sink.kvs.items():
        if (worker.incarnation, "sink", key) not in worker.world.properties.outcomes:
            require(kv.inbound, f"P4: {key} can be read before its end")
            require(kv.committed_len == kv.prefix_len, f"P4: {key} has committed early")


def p5_everything_that_began_has_ended(properties: Properties) -> None:
    """One end per key and side, and hosts and states agree; dead and frozen workers aside."""
    world = properties.world
    for worker in world.living:
        if worker.is_frozen:
            continue
        for side, host in (("source", worker.source), ("sink", worker.sink)):
            for key in host.prompts:
                place = (worker.incarnation, side, key)
                require(place in properties.ends, f"P5: the {side}'s host of {key} waits for ever")
                require(place in properties.outcomes, f"P5: the {side} of {key} never ended")
                agree = (properties.ends[place] in ("closed", "adopted")) == (
                    properties.outcomes[place] in ("closed", "adopted")
                )
                require(agree, f"P5: {side} of {key}: {properties.ends[place]}")
    if not world.has_faults:
        failed = [key for (_, _, key), state in properties.outcomes.items() if state == "aborted"]
        require(not failed, f"P5: {failed} failed without any fault")


def p5_closed_means_adopted(properties: Properties, worker: SimWorker, key: HandoffKey) -> None:
    """At the source's success: the sink has adopted, unless the session ended before it said so."""
    session = worker.driver._source._handoffs[key].peer.session
    outcome = properties.outcomes.get((key.sink_incarnation, "sink", key))
    is_true = session.is_lost or outcome == "adopted" or properties.world.is_lying
    require(is_true, f"P5: {key} is closed, at the sink {outcome}")


def p6_no_state_outlasts_its_deadline(properties: Properties) -> None:
    """After a tick: every live state whose time nothing renews has time left."""
    now = properties.world.clock.now()
    for (incarnation, side, key), (window, since) in properties.states.items():
        worker = properties.world.by_incarnation.get(incarnation)
        if worker is None or not worker.can_move or worker.step is not None or window in _RENEWED:
            continue
        limit = _timeout_s(worker, side, window)
        require(now < since + limit, f"P6: {side} of {key} is {window} since {since}, now {now}")


def p6_a_lost_session_ends_its_handoffs(worker: SimWorker, session: SimSession) -> None:
    """After an engine has heard of the loss: nothing of that session is left to a deadline."""
    for side in (worker.driver._source, worker.driver._sink):
        for key, handoff in side._handoffs.items():
            if handoff.peer.session is session:
                state = handoff.core.state
                require(state.value in _TERMINAL, f"P6: {key} is {state.value}, its session lost")


def p6_everything_is_given_back(worker: SimWorker) -> None:
    """At rest: no handoff, stream, link thread, row, pin or private slot is left."""
    require(worker.driver.handoffs_open() == 0, f"P6: {worker.name} has open handoffs")
    accounts = worker.kv_cache.accounts()
    require(accounts.is_idle, f"P6: {worker.name} keeps {accounts}")
    require(not worker.link_ends, f"P6: {worker.name} has link threads left")
    require(worker.census._open == 0, f"P6: {worker.name} counts {worker.census._open} threads")
    for side in (worker.driver._sink, worker.driver._source):
        require(not side._peers, f"P6: {worker.name} keeps sessions")


def p7_what_is_gathered_is_the_prompts(worker, key, header, payload, lane) -> None:
    """A payload has the bytes of its tokens, layers and heads."""
    world, region = worker.world, header.region
    content = world.requests[key].content
    heads = world.setup.heads // len(worker.pools)
    first = lane.source_rank * heads
    part = content[
        region.layer_start : region.layer_stop,
        :,
        region.token_start : region.token_stop,
        first + lane.source_heads.start : first + lane.source_heads.stop,
    ]
    came = payload.numpy().view(np.float32).reshape(part.shape)
    require((came == part).all(), f"P7: {region} of {key} was gathered with other bytes")


def p7_the_sink_has_the_prompts_bytes(worker: SimWorker, key: HandoffKey) -> None:
    """What the sink decodes from is what the source computed."""
    kv = worker.sink.kvs[key]
    same = worker.store.is_whole(kv, worker.world.requests[key].content, kv.committed_len)
    require(same, f"P7: the sink's KV of {key} is not the source's")


def p8_nothing_old_changes_anything(worker: SimWorker, before: object, message: object) -> None:
    """After something old was said: the worker is as it was."""
    require(fingerprint(worker) == before, f"P8: {message} changed {worker.name}")


def fingerprint(worker: SimWorker) -> tuple[object, ...]:
    """Everything of a worker's handoffs and KV that a message could change, but for counts."""
    source, sink = worker.driver._source, worker.driver._sink
    sources = tuple(
        (
            key,
            h.core.state,
            h.core.computed_tokens,
            h.core.handed_tokens,
            h.core.handed_layers,
            h.core.stream,
            h.core.link_generation,
        )
        for key, h in source._handoffs.items()
    )
    sinks = tuple(
        (key, h.core.state, h.core.resume_at, h.core.remaining, h.core.first_tokens_at is None)
        for key, h in sink._handoffs.items()
    )
    links = tuple(
        (peer.generation, None if peer.link is None else peer.link.core.state)
        for peer in source._peers.values()
    )
    ends = tuple(None if peer.link is None else peer.link.state for peer in sink._peers.values())
    accounts = worker.kv_cache.accounts()
    return sources, sinks, links, ends, accounts, len(worker.source.kvs), len(worker.sink.kvs)


def short(key: HandoffKey) -> str:
    """A key without incarnations."""
    return f"{key.request_id}#{key.attempt}"


def _piece(header: ChunkHeader) -> str:
    piece = header.region
    tokens = f"tokens [{piece.token_start}, {piece.token_stop})"
    return f"{tokens} layers [{piece.layer_start}, {piece.layer_stop})"


def _live(worker: SimWorker, key: HandoffKey) -> RequestKV | None:
    name = str(key)
    for kv in worker.kv_cache.live_requests():
        if kv.request_id == name:
            return kv
    return None


def _timeout_s(worker: SimWorker, side: str, window: str) -> float:
    deadlines = worker.driver._endpoint.deadlines
    if side == "sink":
        return deadlines.sink[SinkState(window)].timeout_s
    name = "offered" if window == "offer window" else window
    return deadlines.source[SourceState(name)].timeout_s
