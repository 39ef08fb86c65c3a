"""The source's side of all handoffs of a worker: performs what the source cores ask for.

Everything here is on the engine thread; slots are read by the link's thread (`outgoing`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_transfer.handoff_views import source_view
from kv_transfer.links.choice import choose_transport
from kv_transfer.outgoing_link import OutgoingLink
from kv_transfer.prompt_times import PromptTimes
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
    Complete,
    Grant,
    LinkDown,
    Prefill,
    Received,
)
from kv_transfer.protocol.source import SourceCore
from kv_transfer.protocol.states import SOURCE_TERMINAL, LinkState, SourceState
from kv_transfer.protocol.tombstones import Tombstones
from kvferry.errors import KvferryError

if TYPE_CHECKING:
    from kv_transfer.endpoint import Endpoint
    from kv_transfer.events import LinkBuilt, PayloadSent
    from kv_transfer.hosts import SourceHost
    from kv_transfer.outgoing import OutgoingStream
    from kv_transfer.protocol.effects import Effect, Effects
    from kv_transfer.protocol.key import HandoffKey
    from kv_transfer.protocol.messages import Hello
    from kv_transfer.protocol.region import Region
    from kv_transfer.session import Session
    from kvferry.generation import OutputToken
    from kvferry.handoff_view import HandoffView
    from mem_cache.request_kv import RequestKV


class SinkPeer:
    """One session with a sink, and its link."""

    def __init__(self, session: Session, hello: Hello, staging_buffer_bytes: int) -> None:
        self.session = session
        self.hello = hello
        self.payload_bytes_max = min(staging_buffer_bytes, hello.staging_buffer_bytes)
        """What fits a staging buffer of either side."""
        self.link: OutgoingLink | None = None
        self.generation = 0
        """Of the link opened last."""
        self.streaming: dict[int, _Outgoing] = {}
        """Handoffs with open streams, by the number that the sink gave them."""


@dataclass(slots=True, eq=False)
class _Outgoing:
    core: SourceCore
    peer: SinkPeer
    times: PromptTimes
    kv: RequestKV | None = None
    link: OutgoingLink | None = None
    """What carries it, from its first piece on."""
    streams: tuple[OutgoingStream, ...] = ()
    """One per lane of that link; open while its slots may be read."""
    traced: SourceState | None = None


class SourceSide:
    """Live and ended handoffs of which this worker is the source."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.host: SourceHost | None = None
        self._endpoint = endpoint
        self._handoffs: dict[HandoffKey, _Outgoing] = {}
        self._peers: dict[Session, SinkPeer] = {}
        self._tombstones: Tombstones[SourceState] = Tombstones()

    def __len__(self) -> int:
        return len(self._handoffs)

    def views(self) -> list[HandoffView]:
        """Of those that have not ended, oldest first, for people."""
        now = self._now()
        return [
            source_view(each.core, now - each.times.asked_at) for each in self._handoffs.values()
        ]

    # --- the host ---

    def scheduled(self, key: HandoffKey, kv: RequestKV, hit_tokens: int) -> None:
        """The prompt has a row and slots, `hit_tokens` of it from any tier of the cache."""
        handoff = self._live(key)
        if handoff is None:
            return
        handoff.kv = kv
        self._open_link(handoff.peer)
        host_hits = kv.host_hit_len
        now = handoff.times.scheduled_at = self._now()
        self._perform(handoff, handoff.core.scheduled(hit_tokens - host_hits, now, host_hits))

    def held(self, key: HandoffKey, kv: RequestKV) -> None:
        """What is committed of `kv` is all that this worker has of the prompt: offer that."""
        handoff = self._live(key)
        if handoff is None:
            return
        handoff.kv = kv
        now = handoff.times.scheduled_at = handoff.times.computed_at = self._now()
        self._perform(handoff, handoff.core.held(kv.committed_len, now))

    def computing(self, key: HandoffKey, tokens: int, layers: int) -> None:
        """A step has written the KV of tokens [0, tokens) in layers [0, layers)."""
        handoff = self._handoffs.get(key)
        # Between two layers nobody can end it; before the step its host may have been told.
        if handoff is None or handoff.core.state is not SourceState.STREAMING:
            return
        link = self._open_link(handoff.peer)
        core = handoff.core
        fresh = (tokens - core.handed_tokens) * (layers - core.handed_layers)
        if fresh >= link.cells_per_payload():
            self._perform(handoff, core.computing(tokens, layers, self._now()))

    def computed(self, key: HandoffKey, tokens: int) -> None:
        """The KV of tokens [0, tokens) is in the pool."""
        handoff = self._live(key)
        if handoff is None:
            return
        assert handoff.kv is not None, f"{key} computes without being scheduled"
        assert tokens <= handoff.kv.committed_len, f"{key}: {tokens} tokens are not committed"
        self._perform(handoff, handoff.core.computed(tokens, self._now()))

    def finished(self, key: HandoffKey, first_tokens: tuple[OutputToken, ...]) -> None:
        """The whole prompt is computed."""
        handoff = self._live(key)
        if handoff is None:
            return
        assert handoff.kv is not None, f"{key} finishes without being scheduled"
        assert handoff.core.prompt_tokens <= handoff.kv.committed_len, f"{key} is not committed"
        now = handoff.times.computed_at = self._now()
        self._perform(handoff, handoff.core.finished(first_tokens, now))

    def abort(self, key: HandoffKey, reason: str) -> None:
        """The host gives up."""
        handoff = self._live(key)
        if handoff is not None:
            self._perform(handoff, handoff.core.abort(reason, self._now()))

    # --- sessions ---

    def session_opened(self, session: Session, hello: Hello) -> None:
        """A sink has greeted."""
        self._endpoint.counters["sessions_opened"] += 1
        self._peers[session] = SinkPeer(session, hello, self._endpoint.config.staging_buffer_bytes)

    def peer_of(self, session: Session) -> Hello | None:
        """Who speaks in a session; None if it has ended."""
        peer = self._peers.get(session)
        return None if peer is None else peer.hello

    def session_lost(self, session: Session, reason: str) -> None:
        """End everything with that sink at once."""
        peer = self._peers.pop(session, None)
        if peer is None:
            return
        self._endpoint.counters["sessions_lost"] += 1
        now = self._now()
        for handoff in self._of(peer):
            if handoff.core.state not in SOURCE_TERMINAL:
                self._perform(handoff, handoff.core.session_lost(reason, now))

    def close(self, reason: str) -> None:
        """End everything with every sink."""
        for session in list(self._peers):
            self.session_lost(session, reason)

    def on_message(
        self,
        session: Session,
        message: Prefill | Grant | Busy | Received | Abort | Aborted | LinkDown,
    ) -> None:
        """A message of a sink."""
        peer = self._peers.get(session)
        if peer is None:
            self._endpoint.counters["late_messages"] += 1
            return
        match message:
            case LinkDown():
                self.link_failed(session, message.link_generation, message.reason)
            case Prefill():
                self._on_prefill(peer, message)
            case _:
                self._on_handoff_message(peer, message)

    def _on_prefill(self, peer: SinkPeer, message: Prefill) -> None:
        key = message.key
        counters, now = self._endpoint.counters, self._now()
        known = self._handoffs.get(key)
        if known is not None and known.peer is peer:
            counters["duplicate_messages"] += 1
            return
        if known is not None or key in self._tombstones:
            # If its sink still waits, nothing else will ever answer it.
            counters["late_messages"] += 1
            peer.session.send(Abort(key, "this handoff has begun before"))
            return
        problem = self._refusal(peer, message)
        if problem is not None:
            counters["source_refused"] += 1
            peer.session.send(Abort(key, problem))
            self._tombstones.bury(key, SourceState.ABORTED)
            return
        core = SourceCore(
            key,
            len(message.prompt),
            layout_hash=self._endpoint.hello.layout_hash,
            num_layers=self._endpoint.kv_cache.layout.num_layers,
            samples=0 if message.held_only else message.sampling.n,
            deadlines=self._endpoint.deadlines,
            now_s=now,
        )
        handoff = _Outgoing(core, peer, PromptTimes(now))
        self._handoffs[key] = handoff
        counters["source_started"] += 1
        assert self.host is not None, "a handoff came before the source's host was set"
        try:
            if message.held_only:
                self.host.start_held(key, message.prompt, message.cache_use)
            else:
                self.host.start(
                    key, message.prompt, message.sampling, message.cache_use, message.goes_first
                )
        except KvferryError as error:
            counters["source_refused"] += 1
            self._perform(handoff, core.abort(f"refused: {error}", now, error.kind))

    def _refusal(self, peer: SinkPeer, message: Prefill) -> str | None:
        hello = self._endpoint.hello
        key = message.key
        if key.source_incarnation != hello.incarnation:
            return (
                f"meant for incarnation {key.source_incarnation:x},"
                f" this is {hello.incarnation:x} of {hello.worker_id}"
            )
        if key.sink_incarnation != peer.hello.incarnation:
            return f"the key names sink {key.sink_incarnation:x}, not the session's"
        if message.layout_hash != hello.layout_hash:
            return f"KV layout {message.layout_hash} of the sink is not ours, {hello.layout_hash}"
        if len(message.prompt) == 0:
            return "the prompt is empty"
        layout = self._endpoint.kv_cache.layout
        heads = max(lane.source_heads.stop - lane.source_heads.start for lane in peer.session.lanes)
        token_bytes = layout.bytes_per_token // layout.heads * heads
        if peer.payload_bytes_max < token_bytes:
            return (
                f"the sink's staging buffers of {peer.hello.staging_buffer_bytes} bytes"
                f" do not hold one token, {token_bytes} bytes"
            )
        return None

    def _on_handoff_message(
        self, peer: SinkPeer, message: Grant | Busy | Received | Abort | Aborted
    ) -> None:
        counters = self._endpoint.counters
        handoff = self._handoffs.get(message.key)
        if handoff is None or handoff.peer is not peer:
            self._on_stale(peer, message)
            return
        if isinstance(message, Aborted):
            counters["duplicate_messages"] += 1
            return
        duplicates = handoff.core.duplicates
        try:
            effects = handoff.core.on_message(message, self._now())
        except (IllegalEvent, BadMessage) as error:
            counters["illegal_messages"] += 1
            effects = handoff.core.protocol_error(str(error), self._now())
        counters["duplicate_messages"] += handoff.core.duplicates - duplicates
        self._perform(handoff, effects)

    def _on_stale(self, peer: SinkPeer, message: Grant | Busy | Received | Abort | Aborted) -> None:
        """A handoff that has ended, or that we never heard of: counted, nothing changes."""
        outcome = self._tombstones.outcome(message.key)
        if isinstance(message, Aborted) and outcome is SourceState.ABORTED:
            return
        counters = self._endpoint.counters
        counters["unknown_messages" if outcome is None else "late_messages"] += 1
        if isinstance(message, Abort):
            peer.session.send(Aborted(message.key))
        elif outcome is None and not isinstance(message, Aborted):
            peer.session.send(Abort(message.key, "unknown handoff"))

    # --- the link ---

    def link_built(self, event: LinkBuilt) -> None:
        """Every lane exists at this end."""
        link = self._link(event.session, event.generation)
        if link is not None and link.core.state is LinkState.BUILDING:
            link.core.built(self._now())

    def payload_sent(self, event: PayloadSent) -> None:
        """A payload has left its buffer."""
        counters, now = self._endpoint.counters, self._now()
        counters["chunks_sent"] += 1
        counters["bytes_sent"] += event.payload_bytes
        link = self._link(event.session, event.generation)
        if link is None:
            return
        link.core.done(event.payload_bytes, now)
        handoff = self._peers[event.session].streaming.get(event.stream)
        if handoff is not None:
            self._perform(handoff, handoff.core.sent(now))

    def link_failed(self, session: Session, generation: int, reason: str) -> None:
        """A link generation has ended: its handoffs fail, everyone else's go on."""
        peer = self._peers.get(session)
        if peer is not None and peer.link is not None and peer.generation == generation:
            self._end_link(peer, reason)

    def _open_link(self, peer: SinkPeer) -> OutgoingLink:
        if peer.link is not None:
            return peer.link
        self._make_room_for_link()
        peer.generation += 1
        link = peer.link = OutgoingLink(
            peer.generation,
            self._endpoint,
            peer.session.lanes,
            peer.payload_bytes_max,
            self._now(),
        )
        self._endpoint.counters["links_opened"] += 1
        peer.session.open_link(
            peer.generation, choose_transport(self._endpoint.hello, peer.hello), link.queues
        )
        return link

    def _make_room_for_link(self) -> None:
        """Close the link that rested longest, if there are as many as may be."""
        linked = [peer for peer in self._peers.values() if peer.link is not None]
        if len(linked) < self._endpoint.config.links_max:
            return
        busy = {handoff.link for handoff in self._handoffs.values()}
        resting = [peer for peer in linked if peer.link not in busy]
        if resting:
            oldest = min(resting, key=lambda peer: peer.link.core.used_at if peer.link else 0.0)
            self._end_link(oldest, "another pair needs a link more")

    def _end_link(self, peer: SinkPeer, reason: str) -> None:
        # Taken before any host hears of it: what a host starts now rides on the next generation.
        link, now = peer.link, self._now()
        assert link is not None
        peer.link = None
        self._endpoint.counters["links_lost"] += 1
        peer.session.close_link(link.core.generation, reason)
        for handoff in self._of(peer):
            if handoff.link is link:
                self._close_streams(handoff)
                if handoff.core.state not in SOURCE_TERMINAL:
                    self._perform(handoff, handoff.core.link_lost(reason, now))

    def _link(self, session: Session, generation: int) -> OutgoingLink | None:
        peer = self._peers.get(session)
        return peer.link if peer is not None and peer.generation == generation else None

    def _stream(self, handoff: _Outgoing, region: Region) -> None:
        """Hand a piece to the link, with the slots that hold it now."""
        kv, core = handoff.kv, handoff.core
        assert kv is not None
        assert core.stream is not None
        link = self._open_link(handoff.peer)
        if handoff.link is None:
            handoff.link, handoff.streams = link, link.open_streams(core.stream)
            handoff.peer.streaming[core.stream] = handoff
            core.link_generation = link.core.generation
        assert handoff.link is link, f"{core.key} outlived its link"
        slots = self._endpoint.kv_cache.slots(kv, region.token_start, region.token_stop)
        link.submit(handoff.streams, region, slots, self._now())

    def _close_streams(self, handoff: _Outgoing) -> None:
        """From here on nothing reads the handoff's slots."""
        streams, handoff.streams = handoff.streams, ()
        if handoff.link is not None and streams:
            handoff.link.close_streams(streams, self._now())
            del handoff.peer.streaming[streams[0].number]

    # --- time ---

    def on_time(self) -> None:
        """Do what is due."""
        now = self._now()
        for handoff in list(self._handoffs.values()):
            self._perform(handoff, handoff.core.on_time(now))
        for peer in list(self._peers.values()):
            reason = None if peer.link is None else peer.link.core.on_time(now)
            if reason is not None:
                self._end_link(peer, reason)

    def wakes_at(self) -> float | None:
        """When `on_time` is due next."""
        times = [handoff.core.wakes_at for handoff in self._handoffs.values()]
        times += [peer.link.core.wakes_at for peer in self._peers.values() if peer.link]
        return min((time for time in times if time is not None), default=None)

    # --- effects ---

    def _perform(self, handoff: _Outgoing, effects: Effects) -> None:
        core = handoff.core
        if core.state is not handoff.traced:
            handoff.traced = core.state
            self._endpoint.tell("source", core.key, core.state.value)
            if core.state is SourceState.STREAMING:
                handoff.times.granted_at = self._now()
        if core.state in SOURCE_TERMINAL and self._handoffs.get(core.key) is handoff:
            # Buried before the host hears of it: whatever it calls now is late.
            del self._handoffs[core.key]
            self._close_streams(handoff)
            self._tombstones.bury(core.key, core.state)
            self._endpoint.counters[f"source_{core.state.value}"] += 1
        for effect in effects:
            self._perform_one(handoff, effect)

    def _perform_one(self, handoff: _Outgoing, effect: Effect) -> None:
        core, kv_cache = handoff.core, self._endpoint.kv_cache
        match effect:
            case Send(message):
                handoff.peer.session.send(message)
            case Stream(region):
                self._stream(handoff, region)
            case SendComplete(tokens):
                marks = handoff.times.completed(self._now())
                handoff.peer.session.send(Complete(core.key, tokens, core.link_generation, marks))
            case Pin():
                assert handoff.kv is not None
                kv_cache.pin(handoff.kv)
            case Unpin():
                assert handoff.kv is not None
                kv_cache.unpin(handoff.kv)
            case NotifyClosed():
                self._require_host().closed(core.key)
            case NotifyCancelled(reason):
                self._require_host().cancel(core.key, reason)
            case _:
                raise AssertionError(f"{effect} at a source")

    # --- inside ---

    def _require_host(self) -> SourceHost:
        assert self.host is not None, "the source's host is not set"
        return self.host

    def _of(self, peer: SinkPeer) -> list[_Outgoing]:
        return [handoff for handoff in self._handoffs.values() if handoff.peer is peer]

    def _live(self, key: HandoffKey) -> _Outgoing | None:
        """The live handoff; None if it has ended meanwhile, which its host has been told."""
        handoff = self._handoffs.get(key)
        if handoff is None:
            assert key in self._tombstones, f"{key} was never started here"
            self._endpoint.counters["late_calls"] += 1
        return handoff

    def _now(self) -> float:
        return self._endpoint.clock.now()
