"""The sink's side of all handoffs of a worker: performs what the sink cores ask for.

Everything here is on the engine thread; payloads are written by the link's thread (`incoming`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_transfer.fetch_failure import fetch_failure
from kv_transfer.handoff_views import sink_view
from kv_transfer.incoming import ChunkFate, IncomingLane, IncomingStream
from kv_transfer.protocol.coverage import Coverage
from kv_transfer.protocol.effects import (
    Commit,
    DeliverFirstTokens,
    NotifyAdopted,
    NotifyFailed,
    Reserve,
    Send,
)
from kv_transfer.protocol.errors import BadMessage, IllegalEvent
from kv_transfer.protocol.link import LinkCore
from kv_transfer.protocol.messages import (
    Abort,
    Aborted,
    Closed,
    Complete,
    FirstToken,
    LinkDown,
    LinkRendezvous,
    Prefill,
    Ready,
)
from kv_transfer.protocol.sink import SinkCore
from kv_transfer.protocol.states import (
    LINK_TERMINAL,
    SINK_RESERVED,
    SINK_TERMINAL,
    LinkState,
    SinkState,
)
from kv_transfer.protocol.tombstones import Tombstones
from kv_transfer.transfer_rate import TransferRate
from kvferry.errors import DuplicateRequest, KvferryError
from kvferry.generation import AttemptUsage

if TYPE_CHECKING:
    from kv_transfer.endpoint import Endpoint
    from kv_transfer.events import ChunkTaken, LinkBuilt
    from kv_transfer.hosts import SinkHost
    from kv_transfer.protocol.effects import Effect, Effects
    from kv_transfer.protocol.key import HandoffKey
    from kv_transfer.protocol.messages import ToEither, ToSink
    from kv_transfer.session import Session
    from kv_transfer.session_hub import SessionHub
    from kvferry.cache_key import CacheUse
    from kvferry.generation import OutputToken, PrefillSource
    from kvferry.handoff_view import HandoffView
    from kvferry.ids import Incarnation, TokenIds
    from kvferry.sampling import SamplingParams
    from mem_cache.request_kv import RequestKV

_Address = tuple[str, "Incarnation"]


class SourcePeer:
    """One session with a source, and its link."""

    def __init__(self, session: Session, address: _Address) -> None:
        self.session = session
        self.address = address
        self.link: LinkCore | None = None
        self.numbers = itertools.count(1)
        """For the streams of handoffs."""
        self.receiving: dict[int, _Incoming] = {}
        """Handoffs with a stream, by its number."""
        self.busy_since: float | None = None
        """When the first payload of the present stretch came; None between stretches."""
        self.busy_bytes = 0


@dataclass(slots=True, eq=False)
class _Incoming:
    core: SinkCore
    peer: SourcePeer
    began_at_s: float
    kv: RequestKV | None = None
    stream: IncomingStream | None = None
    """From the reservation to the end, while payloads may be written to its slots."""
    moved_bytes: int = 0
    traced: SinkState | None = None


class SinkSide:
    """Live and ended handoffs of which this worker is the sink."""

    def __init__(self, endpoint: Endpoint, hub: SessionHub) -> None:
        self.host: SinkHost | None = None
        self.rate = TransferRate()
        self._endpoint = endpoint
        self._hub = hub
        self._handoffs: dict[HandoffKey, _Incoming] = {}
        self._peers: dict[Session, SourcePeer] = {}
        self._by_address: dict[_Address, SourcePeer] = {}
        self._tombstones: Tombstones[SinkState] = Tombstones()

    def __len__(self) -> int:
        return len(self._handoffs)

    def views(self) -> list[HandoffView]:
        """Of those that have not ended, oldest first, for people."""
        now = self._now()
        token_bytes = self._endpoint.kv_cache.layout.bytes_per_token * len(self._endpoint.pools)
        return [
            sink_view(each.core, now - each.began_at_s, each.moved_bytes, token_bytes)
            for each in self._handoffs.values()
        ]

    # --- the host ---

    def fetch(
        self,
        key: HandoffKey,
        source: PrefillSource,
        prompt: TokenIds,
        sampling: SamplingParams,
        cache_use: CacheUse,
        *,
        held_only: bool = False,
        goes_first: bool = False,
    ) -> None:
        """Ask the source for the KV of a prompt. Raises `DuplicateRequest` for a used key."""
        if key in self._handoffs or key in self._tombstones:
            raise DuplicateRequest(str(key))
        peer = self._peer(source)
        layout_hash = self._endpoint.hello.layout_hash
        core = SinkCore(
            key,
            len(prompt),
            layout_hash=layout_hash,
            samples=0 if held_only else sampling.n,
            deadlines=self._endpoint.deadlines,
            now_s=self._now(),
        )
        handoff = self._handoffs[key] = _Incoming(core, peer, self._now())
        self._endpoint.counters["sink_started"] += 1
        peer.session.send(
            Prefill(key, prompt, sampling, cache_use, layout_hash, held_only, goes_first)
        )
        self._perform(handoff, ())

    def abort(self, key: HandoffKey, reason: str) -> None:
        """The host gives up."""
        handoff = self._handoffs.get(key)
        if handoff is None:
            assert key in self._tombstones, f"{key} was never fetched here"
            self._endpoint.counters["late_calls"] += 1
            return
        self._perform(handoff, handoff.core.abort(reason, self._now()))

    # --- sessions ---

    def session_with(self, source: PrefillSource) -> Session | None:
        """The session with that incarnation of a source, if there is one."""
        peer = self._by_address.get((source.address, source.incarnation))
        return None if peer is None else peer.session

    def session_lost(self, session: Session, reason: str) -> None:
        """End everything with that source at once."""
        peer = self._peers.pop(session, None)
        if peer is None:
            return
        self._endpoint.counters["sessions_lost"] += 1
        if self._by_address.get(peer.address) is peer:
            del self._by_address[peer.address]
        now = self._now()
        for handoff in self._of(peer):
            if handoff.core.state not in SINK_TERMINAL:
                self._perform(handoff, handoff.core.session_lost(reason, now))

    def close(self, reason: str) -> None:
        """End everything with every source."""
        for session in list(self._peers):
            self.session_lost(session, reason)

    def on_message(
        self, session: Session, message: ToSink | ToEither | LinkRendezvous | LinkDown
    ) -> None:
        """A message of a source."""
        peer = self._peers.get(session)
        if peer is None:
            self._endpoint.counters["late_messages"] += 1
            return
        match message:
            case LinkRendezvous():
                self._on_rendezvous(peer, message.link_generation)
            case LinkDown():
                self.link_failed(session, message.link_generation, message.reason)
            case Complete():
                self._on_handoff_message(peer, message)
                self._check_carrier(peer, message)
            case _:
                self._on_handoff_message(peer, message)

    def _on_handoff_message(
        self, peer: SourcePeer, message: Ready | FirstToken | Complete | Closed | Abort | Aborted
    ) -> None:
        counters = self._endpoint.counters
        handoff = self._handoffs.get(message.key)
        if handoff is None or handoff.peer is not peer:
            self._on_stale(peer, message)
            return
        if isinstance(message, Aborted | Closed):
            counters["duplicate_messages"] += 1
            return
        duplicates = handoff.core.duplicates
        try:
            effects = handoff.core.on_message(message, self._now())
        except (IllegalEvent, BadMessage) as error:
            counters["illegal_messages"] += 1
            self._perform(handoff, handoff.core.reject(str(error), self._now()))
            return
        counters["duplicate_messages"] += handoff.core.duplicates - duplicates
        self._perform(handoff, effects)

    def _check_carrier(self, peer: SourcePeer, message: Complete) -> None:
        """What a link that is down was to carry will not come."""
        handoff = self._handoffs.get(message.key)
        # Another peer's links say nothing of it.
        if handoff is None or handoff.peer is not peer:
            return
        if handoff.core.state is not SinkState.SETTLING:
            return
        if self._up(peer, message.link_generation) is None:
            reason = f"generation {message.link_generation} is down"
            self._perform(handoff, handoff.core.link_lost(reason, self._now()))

    def _on_stale(
        self,
        peer: SourcePeer,
        message: Ready | FirstToken | Complete | Closed | Abort | Aborted,
    ) -> None:
        """A handoff that has ended, or that we never heard of: counted, nothing changes."""
        outcome = self._tombstones.outcome(message.key)
        match message, outcome:
            case (Closed(), SinkState.ADOPTED) | (Aborted(), SinkState.ABORTED):
                return
            case _:
                pass
        counters = self._endpoint.counters
        counters["unknown_messages" if outcome is None else "late_messages"] += 1
        if isinstance(message, Abort):
            peer.session.send(Aborted(message.key))
        elif outcome is None and not isinstance(message, Aborted | Closed):
            peer.session.send(Abort(message.key, "unknown handoff"))

    # --- the link ---

    def _on_rendezvous(self, peer: SourcePeer, generation: int) -> None:
        """The source begins a link generation; the loop thread has started our end of it."""
        old = peer.link
        if old is not None and old.generation >= generation:
            return
        if old is not None and old.state not in LINK_TERMINAL:
            self._end_link(peer, "the source began another")
        self._endpoint.counters["links_opened"] += 1
        peer.link = LinkCore(generation, self._endpoint.deadlines, self._now())

    def link_built(self, event: LinkBuilt) -> None:
        """Every lane exists at this end."""
        peer = self._peers.get(event.session)
        link = None if peer is None else self._up(peer, event.generation)
        if link is not None and link.state is LinkState.BUILDING:
            link.built(self._now())

    def chunk_taken(self, event: ChunkTaken) -> None:
        """The desk has scattered, dropped or rejected a payload."""
        peer, taken = self._peers.get(event.session), event.taken
        counters = self._endpoint.counters
        if taken.fate is ChunkFate.DROPPED:
            counters["chunks_dropped"] += 1
        else:
            counters["chunks_received"] += 1
            counters["bytes_received"] += taken.header.payload_bytes
        if peer is None:
            return
        self._measure(peer, event)
        handoff = peer.receiving.get(taken.header.stream)
        if handoff is None:
            return
        if taken.fate is ChunkFate.REJECTED:
            counters["chunks_rejected"] += 1
            self._perform(handoff, handoff.core.reject(taken.reason, self._now()))
        elif taken.fate is ChunkFate.SCATTERED:
            # Two lanes may report in another order than they counted, even after the end.
            handoff.moved_bytes = max(taken.moved_bytes, handoff.moved_bytes)
            remaining = min(taken.remaining, handoff.core.remaining)
            self._perform(handoff, handoff.core.scattered(remaining, self._now()))

    def _measure(self, peer: SourcePeer, event: ChunkTaken) -> None:
        """The rate of a stretch: what came after its first payload, in the time that it took."""
        link = self._up(peer, event.generation)
        if link is not None and link.state is not LinkState.BUILDING:
            link.posted(event.taken.header.payload_bytes, event.taken_at_s)
            link.done(event.taken.header.payload_bytes, event.taken_at_s)
        if peer.busy_since is None:
            peer.busy_since, peer.busy_bytes = event.taken_at_s, 0
        else:
            peer.busy_bytes += event.taken.header.payload_bytes
        if event.taken.header.is_last:
            if peer.busy_bytes:
                self.rate.add(peer.busy_bytes, event.taken_at_s - peer.busy_since)
            peer.busy_since = None

    def link_failed(self, session: Session, generation: int, reason: str) -> None:
        """A link generation has ended: its handoffs fail, everyone else's go on."""
        peer = self._peers.get(session)
        if peer is not None and self._up(peer, generation) is not None:
            self._end_link(peer, reason)

    def _end_link(self, peer: SourcePeer, reason: str) -> None:
        link, now = peer.link, self._now()
        assert link is not None
        link.failed(now)
        peer.busy_since = None
        self._endpoint.counters["links_lost"] += 1
        peer.session.close_link(link.generation, reason)
        for handoff in list(peer.receiving.values()):
            core = handoff.core
            # One that has received nothing may yet ride on the next generation: its `Complete`
            # says which. One that has received everything needs no link.
            hit = core.has_received or core.state is SinkState.SETTLING
            if hit and core.remaining and core.state in SINK_RESERVED:
                self._perform(handoff, core.link_lost(reason, now))

    def _up(self, peer: SourcePeer, generation: int | None) -> LinkCore | None:
        """The core of that generation if it is up or being built."""
        link = peer.link
        if link is None or link.generation != generation or link.state in LINK_TERMINAL:
            return None
        return link

    # --- time ---

    def on_time(self) -> None:
        """Do what is due."""
        now = self._now()
        for handoff in list(self._handoffs.values()):
            self._perform(handoff, handoff.core.on_time(now))
        for peer in list(self._peers.values()):
            link = self._watched(peer)
            reason = None if link is None else link.on_time(now)
            if reason is not None:
                self._end_link(peer, reason)

    def wakes_at(self) -> float | None:
        """When `on_time` is due next."""
        times = [handoff.core.wakes_at for handoff in self._handoffs.values()]
        links = [self._watched(peer) for peer in self._peers.values()]
        times += [link.wakes_at for link in links if link is not None]
        return min((time for time in times if time is not None), default=None)

    def _watched(self, peer: SourcePeer) -> LinkCore | None:
        """Its link, unless that rests: the source closes it then, for it knows what will come."""
        link = peer.link
        return None if link is None or link.state is LinkState.IDLE else link

    # --- effects ---

    def _perform(self, handoff: _Incoming, effects: Effects) -> None:
        core = handoff.core
        if core.state is not handoff.traced:
            handoff.traced = core.state
            self._endpoint.tell("sink", core.key, core.state.value)
        if core.state in SINK_TERMINAL and self._is_live(handoff):
            # Buried before the host hears of it: whatever it calls now is late.
            del self._handoffs[core.key]
            self._forget_stream(handoff)
            self._tombstones.bury(core.key, core.state)
            self._endpoint.counters[f"sink_{core.state.value}"] += 1
        for effect in effects:
            self._perform_one(handoff, effect)

    def _perform_one(self, handoff: _Incoming, effect: Effect) -> None:
        key, host = handoff.core.key, self._require_host()
        match effect:
            case Send(message):
                handoff.peer.session.send(message)
            case Reserve(prompt_tokens):
                self._reserve(handoff, prompt_tokens)
            case DeliverFirstTokens(tokens):
                self._deliver_first_tokens(handoff, tokens)
            case Commit(tokens):
                assert handoff.kv is not None
                self._endpoint.kv_cache.commit(handoff.kv, tokens)
                self._endpoint.kv_cache.adopt(handoff.kv)
            case NotifyAdopted():
                host.adopted(key, self._usage(handoff))
            case NotifyFailed(reason, kind):
                host.failed(key, fetch_failure(reason, kind))
            case _:
                raise AssertionError(f"{effect} at a sink")

    def _reserve(self, handoff: _Incoming, prompt_tokens: int) -> None:
        core = handoff.core
        try:
            kv = self._require_host().reserve(core.key, prompt_tokens)
        except KvferryError as error:
            self._perform(handoff, core.reject(f"no slots: {error}", self._now(), error.kind))
            return
        if kv is None:
            self._endpoint.counters["sink_busy"] += 1
            self._perform(handoff, core.refused(self._now()))
            return
        assert kv.inbound, f"{core.key}: reserved slots must be inbound"
        assert kv.allocated_len >= prompt_tokens, f"{core.key}: {kv} lacks slots"
        handoff.kv = kv
        stream = self._expect_stream(handoff, kv)
        effects = core.reserved(kv.committed_len, stream.number, stream.remaining, self._now())
        self._perform(handoff, effects)

    def _expect_stream(self, handoff: _Incoming, kv: RequestKV) -> IncomingStream:
        """Take payloads into the slots of `kv` from now on."""
        endpoint, peer = self._endpoint, handoff.peer
        start, stop = kv.committed_len, handoff.core.prompt_tokens
        lanes = {
            lane.index: IncomingLane(
                endpoint.pools[lane.sink_rank],
                lane.sink_heads,
                Coverage(start, stop, endpoint.kv_cache.layout.num_layers),
            )
            for lane in peer.session.lanes
        }
        slots = endpoint.kv_cache.slots(kv, start, stop)
        stream = handoff.stream = IncomingStream(next(peer.numbers), slots, start, lanes)
        peer.receiving[stream.number] = handoff
        peer.session.desk.expect(stream)
        return stream

    def _forget_stream(self, handoff: _Incoming) -> None:
        """From here on nothing is written to the handoff's slots."""
        stream, handoff.stream = handoff.stream, None
        if stream is not None:
            handoff.peer.session.desk.forget(stream)
            del handoff.peer.receiving[stream.number]

    def _deliver_first_tokens(self, handoff: _Incoming, tokens: tuple[OutputToken, ...]) -> None:
        core = handoff.core
        try:
            self._require_host().first_tokens(core.key, tokens)
        except KvferryError as error:
            if core.state in SINK_TERMINAL:
                return  # the host has ended it itself
            self._endpoint.counters["illegal_messages"] += 1
            # The tokens are the source's doing, whatever kind of error it is here.
            self._perform(handoff, core.reject(f"first tokens: {error}", self._now()))

    def _usage(self, handoff: _Incoming) -> AttemptUsage:
        core, waited_from = handoff.core, handoff.core.first_tokens_at
        return AttemptUsage(
            prefill_hit_tokens=core.hit_tokens,
            host_hit_tokens=core.host_hit_tokens,
            decode_hit_tokens=core.resume_at,
            moved_tokens=core.moving_tokens,
            moved_bytes=handoff.moved_bytes,
            handoff_ms=0.0 if waited_from is None else 1000 * (self._now() - waited_from),
            source_marks=core.source_marks,
        )

    # --- inside ---

    def _require_host(self) -> SinkHost:
        assert self.host is not None, "the sink's host is not set"
        return self.host

    def _peer(self, source: PrefillSource) -> SourcePeer:
        """The session with that incarnation of the source, opened if there is none."""
        address = (source.address, source.incarnation)
        peer = self._by_address.get(address)
        if peer is None:
            session = self._hub.connect(source)
            peer = SourcePeer(session, address)
            self._by_address[address] = peer
            self._peers[session] = peer
            self._endpoint.counters["sessions_opened"] += 1
        return peer

    def _is_live(self, handoff: _Incoming) -> bool:
        return self._handoffs.get(handoff.core.key) is handoff

    def _of(self, peer: SourcePeer) -> list[_Incoming]:
        return [handoff for handoff in self._handoffs.values() if handoff.peer is peer]

    def _now(self) -> float:
        return self._endpoint.clock.now()
