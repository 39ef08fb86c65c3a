"""The sink's side of all handoffs of a worker: performs what the sink cores ask for.

Everything here is on the engine thread, so that one check decides whether a payload may be
written into slots.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_transfer.protocol.effects import (
    Commit,
    DeliverFirstToken,
    NotifyAdopted,
    NotifyFailed,
    Reserve,
    Send,
)
from kv_transfer.protocol.errors import BadMessage, IllegalEvent, PromptRefused
from kv_transfer.protocol.link import ReceivingLinkCore
from kv_transfer.protocol.messages import (
    Abort,
    Aborted,
    Chunk,
    Closed,
    Complete,
    FirstToken,
    LinkDown,
    LinkRendezvous,
    Prefill,
    Ready,
)
from kv_transfer.protocol.sink import SinkCore
from kv_transfer.protocol.states import LINK_TERMINAL, SINK_TERMINAL, LinkState, SinkState
from kv_transfer.protocol.tombstones import Tombstones
from kv_transfer.transfer_rate import TransferRate
from kvferry.errors import DuplicateRequest, ErrorKind, HandoffFailed, KvferryError, Overloaded
from kvferry.generation import AttemptUsage
from mem_cache.layout import KvPart

if TYPE_CHECKING:
    from kv_transfer.endpoint import Endpoint
    from kv_transfer.events import PayloadArrived, ReceiverBuilt, ReceivesPosted
    from kv_transfer.hosts import SinkHost
    from kv_transfer.link import ReceivingLink
    from kv_transfer.protocol.effects import Effect, Effects
    from kv_transfer.protocol.key import HandoffKey
    from kv_transfer.session import Session
    from kv_transfer.session_hub import SessionHub
    from kvferry.cache_key import CacheUse
    from kvferry.generation import OutputToken, PrefillSource
    from kvferry.ids import Incarnation, TokenIds
    from kvferry.sampling import SamplingParams
    from mem_cache.request_kv import RequestKV

_Address = tuple[str, "Incarnation"]

_RETRY_AFTER_S = 1.0
"""Hint to clients when the source's queue is full; it does not say how long that will last."""


class SourcePeer:
    """One session with a source, and its link."""

    def __init__(self, session: Session, address: _Address) -> None:
        self.session = session
        self.address = address
        self.core: ReceivingLinkCore | None = None
        self.link: ReceivingLink | None = None
        self.headers: deque[_Header] = deque()
        """Announced on the link that is up, not yet arrived."""
        self.busy_since = 0.0
        self.busy_bytes = 0
        """Since when the link is busy, and what it has carried since."""


@dataclass(slots=True, eq=False)
class _Incoming:
    core: SinkCore
    peer: SourcePeer
    kv: RequestKV | None = None
    moved_tokens: int = 0
    moved_bytes: int = 0


@dataclass(slots=True, eq=False)
class _Header:
    chunk: Chunk
    accepted_by: _Incoming | None = None
    """The handoff that has checked it; None if there was none: the payload is dropped."""


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

    # --- the host ---

    def fetch(
        self,
        key: HandoffKey,
        source: PrefillSource,
        prompt: TokenIds,
        sampling: SamplingParams,
        cache_use: CacheUse,
    ) -> None:
        """Ask the source for the KV of a prompt. Raises `DuplicateRequest` for a used key."""
        if key in self._handoffs or key in self._tombstones:
            raise DuplicateRequest(str(key))
        peer = self._peer(source)
        layout_hash = self._endpoint.hello.layout_hash
        core = SinkCore(key, len(prompt), layout_hash, self._endpoint.deadlines, self._now())
        self._handoffs[key] = _Incoming(core, peer)
        self._endpoint.counters["sink_started"] += 1
        peer.session.send(Prefill(key, prompt, sampling, cache_use, layout_hash))

    def abort(self, key: HandoffKey, reason: str) -> None:
        """The host gives up."""
        handoff = self._handoffs.get(key)
        if handoff is None:
            assert key in self._tombstones, f"{key} was never fetched here"
            self._endpoint.counters["late_calls"] += 1
            return
        self._perform(handoff, handoff.core.abort(reason, self._now()))

    # --- sessions ---

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
        self,
        session: Session,
        message: Ready
        | Chunk
        | FirstToken
        | Complete
        | Closed
        | Abort
        | Aborted
        | LinkRendezvous
        | LinkDown,
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
            case Chunk():
                header = self._announce(peer, message)
                if header is not None:
                    header.accepted_by = self._on_handoff_message(peer, message)
            case _:
                self._on_handoff_message(peer, message)

    def _on_handoff_message(
        self,
        peer: SourcePeer,
        message: Ready | Chunk | FirstToken | Complete | Closed | Abort | Aborted,
    ) -> _Incoming | None:
        """The handoff that took the message; None if none did."""
        counters = self._endpoint.counters
        handoff = self._handoffs.get(message.key)
        if handoff is None or handoff.peer is not peer:
            self._on_stale(peer, message)
            return None
        if isinstance(message, Aborted | Closed):
            counters["duplicate_messages"] += 1
            return None
        duplicates = handoff.core.duplicates
        try:
            if isinstance(message, Chunk):
                self._check_size(message)
            effects = handoff.core.on_message(message, self._now())
        except (IllegalEvent, BadMessage) as error:
            counters["illegal_messages"] += 1
            self._perform(handoff, handoff.core.reject(str(error), self._now()))
            return None
        counters["duplicate_messages"] += handoff.core.duplicates - duplicates
        self._perform(handoff, effects)
        return handoff

    def _on_stale(
        self,
        peer: SourcePeer,
        message: Ready | Chunk | FirstToken | Complete | Closed | Abort | Aborted,
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

    def _check_size(self, chunk: Chunk) -> None:
        layout = self._endpoint.kv_cache.layout
        tokens = chunk.token_stop - chunk.token_start
        if tokens < 1:
            raise BadMessage(f"{chunk.key}: chunk [{chunk.token_start}, {chunk.token_stop})")
        if (chunk.layer_start, chunk.layer_stop) != (0, layout.num_layers):
            raise BadMessage(f"{chunk.key}: chunk of layers other than all")
        if chunk.payload_bytes != tokens * layout.bytes_per_token:
            raise BadMessage(f"{chunk.key}: {chunk.payload_bytes} bytes for {tokens} tokens")
        if chunk.payload_bytes > self._endpoint.config.staging_buffer_bytes:
            raise BadMessage(f"{chunk.key}: {chunk.payload_bytes} bytes exceed a staging buffer")

    # --- the link ---

    def _on_rendezvous(self, peer: SourcePeer, generation: int) -> None:
        """The source begins a link generation; the loop thread has started our end of it."""
        old = peer.core
        if generation < 1:
            self._endpoint.counters["illegal_messages"] += 1
            peer.session.close(f"link generation {generation}")
            return
        if old is not None and old.generation >= generation:
            return
        if old is not None and old.state not in LINK_TERMINAL:
            self._end_link(peer, "the source began another")
        self._endpoint.counters["links_opened"] += 1
        peer.core = ReceivingLinkCore(generation, self._endpoint.deadlines, self._now())

    def link_built(self, event: ReceiverBuilt) -> None:
        """The local end exists."""
        peer = self._peers.get(event.session)
        core = self._link_core(event.session, event.generation)
        if peer is not None and core is not None:
            peer.link = event.link

    def receives_posted(self, event: ReceivesPosted) -> None:
        """So many more headers may come."""
        core = self._link_core(event.session, event.generation)
        if core is not None:
            if core.state is LinkState.BUILDING:
                core.built(self._now())
            core.grant(event.buffers)

    def _announce(self, peer: SourcePeer, chunk: Chunk) -> _Header | None:
        """Expect the payload, if the header is the next of the link that is up."""
        core = self._link_core(peer.session, chunk.link_generation)
        if core is None:
            self._endpoint.counters["late_messages"] += 1
            return None
        rested = core.state is LinkState.IDLE
        try:
            fresh = core.announce(chunk.link_seq, self._now())
        except (BadMessage, IllegalEvent) as error:
            self._end_link(peer, str(error))
            return None
        if not fresh:
            self._endpoint.counters["duplicate_messages"] += 1
            return None
        if rested:
            peer.busy_since, peer.busy_bytes = self._now(), 0
        header = _Header(chunk)
        peer.headers.append(header)
        return header

    def payload_arrived(self, event: PayloadArrived) -> None:
        """Scatter the payload if its handoff is live, else drop it; the buffer is free again."""
        core = self._link_core(event.session, event.generation)
        if core is None:
            return
        peer = self._peers[event.session]
        header = peer.headers.popleft()
        chunk, handoff = header.chunk, header.accepted_by
        assert chunk.link_seq == event.seq, f"payload {event.seq} for header {chunk}"
        core.completed(self._now())
        if handoff is None or not self._is_live(handoff) or not handoff.core.takes_payload:
            self._endpoint.counters["chunks_dropped"] += 1
        else:
            self._scatter(handoff, chunk, event)
        peer.busy_bytes += event.payload.numel()
        if core.state is LinkState.IDLE:
            self.rate.add(peer.busy_bytes, self._now() - peer.busy_since)
        if peer.link is not None:
            peer.link.recycle(event.buffer)

    def _scatter(self, handoff: _Incoming, header: Chunk, event: PayloadArrived) -> None:
        """Write a payload into the inbound slots. The only place that does."""
        endpoint, core = self._endpoint, handoff.core
        if header.checksum and zlib.crc32(event.payload.numpy().data) != header.checksum:
            endpoint.counters["checksum_errors"] += 1
            reason = f"checksum of tokens [{header.token_start}, {header.token_stop}) differs"
            self._perform(handoff, core.reject(reason, self._now()))
            return
        assert handoff.kv is not None
        slots = endpoint.kv_cache.slots(handoff.kv, header.token_start, header.token_stop)
        part = KvPart(header.layer_start, header.layer_stop, 0, endpoint.kv_cache.layout.heads)
        endpoint.kv_cache.pool.scatter(slots, part, event.payload)
        handoff.moved_tokens += header.token_stop - header.token_start
        handoff.moved_bytes += header.payload_bytes
        endpoint.counters["chunks_received"] += 1
        endpoint.counters["bytes_received"] += header.payload_bytes
        self._perform(handoff, core.scattered(self._now()))

    def link_failed(self, session: Session, generation: int, reason: str) -> None:
        """A link generation has ended: its handoffs fail, everyone else's go on."""
        if self._link_core(session, generation) is not None:
            self._end_link(self._peers[session], reason)

    def _end_link(self, peer: SourcePeer, reason: str) -> None:
        core = peer.core
        assert core is not None
        now = self._now()
        core.failed(now)
        peer.link = None
        peer.headers.clear()
        self._endpoint.counters["links_lost"] += 1
        peer.session.close_link(core.generation, reason)
        for handoff in self._of(peer):
            live = handoff.core.state not in SINK_TERMINAL
            if live and handoff.core.link_generation == core.generation:
                self._perform(handoff, handoff.core.link_lost(reason, now))

    def _link_core(self, session: Session, generation: int) -> ReceivingLinkCore | None:
        """The core of that generation if it is up or being built."""
        peer = self._peers.get(session)
        core = None if peer is None else peer.core
        if core is None or core.generation != generation or core.state in LINK_TERMINAL:
            return None
        return core

    # --- time ---

    def on_time(self) -> None:
        """Do what is due."""
        now = self._now()
        for handoff in list(self._handoffs.values()):
            self._perform(handoff, handoff.core.on_time(now))
        for peer in list(self._peers.values()):
            reason = None if peer.core is None else peer.core.on_time(now)
            if reason is not None:
                self._end_link(peer, reason)

    def wakes_at(self) -> float | None:
        """When `on_time` is due next."""
        times = [handoff.core.wakes_at for handoff in self._handoffs.values()]
        times += [peer.core.wakes_at for peer in self._peers.values() if peer.core]
        return min((time for time in times if time is not None), default=None)

    # --- effects ---

    def _perform(self, handoff: _Incoming, effects: Effects) -> None:
        core = handoff.core
        if core.state in SINK_TERMINAL and self._is_live(handoff):
            # Buried before the host hears of it: whatever it calls now is late.
            del self._handoffs[core.key]
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
            case DeliverFirstToken(token):
                self._deliver_first_token(handoff, token)
            case Commit(tokens):
                assert handoff.kv is not None
                self._endpoint.kv_cache.commit(handoff.kv, tokens)
                self._endpoint.kv_cache.adopt(handoff.kv)
            case NotifyAdopted():
                host.adopted(key, self._usage(handoff))
            case NotifyFailed(reason, kind):
                host.failed(key, _failure(reason, kind))
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
        self._perform(handoff, core.reserved(kv.committed_len, self._now()))

    def _deliver_first_token(self, handoff: _Incoming, token: OutputToken) -> None:
        core = handoff.core
        try:
            self._require_host().first_token(core.key, token)
        except KvferryError as error:
            if core.state in SINK_TERMINAL:
                return  # the host has ended it itself
            self._endpoint.counters["illegal_messages"] += 1
            # The token is the source's doing, whatever kind of error it is here.
            self._perform(handoff, core.reject(f"first token: {error}", self._now()))

    def _usage(self, handoff: _Incoming) -> AttemptUsage:
        core = handoff.core
        assert core.first_token_at is not None
        return AttemptUsage(
            prefill_hit_tokens=core.hit_tokens,
            host_hit_tokens=core.host_hit_tokens,
            decode_hit_tokens=core.resume_at,
            moved_tokens=handoff.moved_tokens,
            moved_bytes=handoff.moved_bytes,
            handoff_ms=1000 * (self._now() - core.first_token_at),
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


def _failure(reason: str, kind: ErrorKind | None) -> KvferryError:
    """What the host hears: by default that another try may succeed."""
    match kind:
        case ErrorKind.OVERLOADED:
            # The source's text ends with a hint of its own.
            return Overloaded(reason.partition("; retry after ")[0], _RETRY_AFTER_S)
        case ErrorKind.INVALID_INPUT:
            return PromptRefused(reason)
        case _:
            return HandoffFailed(reason)
