"""The driver: one object per worker that carries both sides of all its handoffs.

| method | thread | when |
|---|---|---|
| fetch, abort_fetch | engine | the sink's host wants KV, or no longer |
| scheduled, held, computing, computed, finished | engine | the source's host makes progress |
| abort_source | engine | the source's host gives up |
| offer | engine | the sink's host gives KV back after a handoff |
| handle | engine | an event came through `post` |
| tick, next_deadline | engine | between steps |
| handoffs_open, counters, link_bytes_per_s | engine | for load reports |
| announce | any | once, before the first handoff |
| servicer, wait_closed | loop | start and end of the worker's gRPC server |
| close | engine | once, at the end |

None of them blocks. Hosts are called back from within `fetch` .. `tick`, on the engine thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kv_transfer.endpoint import Endpoint
from kv_transfer.events import (
    ChunkTaken,
    LinkBuilt,
    LinkFailed,
    MessageCame,
    PayloadSent,
    SessionLost,
    SessionOpened,
    ShowHandoffs,
)
from kv_transfer.links.choice import build_factories, host_fingerprint
from kv_transfer.protocol.deadlines import build_deadlines
from kv_transfer.protocol.messages import (
    Abort,
    Aborted,
    Busy,
    Closed,
    Complete,
    FirstToken,
    Grant,
    Hello,
    KvOffer,
    LinkDown,
    LinkRendezvous,
    LinkSignal,
    Prefill,
    Ready,
    Received,
)
from kv_transfer.session_hub import HandoffServicer, SessionHub
from kv_transfer.sink_side import SinkSide
from kv_transfer.source_side import SourceSide
from kvferry.errors import ConfigError
from kvferry.generation import PrefillSource
from kvferry.limits import HANDOFFS_SHOWN_MAX

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from kv_transfer.hosts import OfferHost, SinkHost, SourceHost
    from kv_transfer.links.interface import LinkFactory
    from kv_transfer.protocol.key import HandoffKey
    from kv_transfer.session import Session
    from kvferry.cache_key import CacheUse
    from kvferry.clock import Clock
    from kvferry.config import HandoffConfig
    from kvferry.errors import KvferryError
    from kvferry.generation import OutputToken
    from kvferry.ids import Incarnation, TokenIds, WorkerId
    from kvferry.sampling import SamplingParams
    from mem_cache.kv_cache import KVCache
    from mem_cache.request_kv import RequestKV


class HandoffDriver:
    """Both sides of a worker's handoffs. See the module's table for threads."""

    def __init__(  # noqa: PLR0913  # keyword-only wiring, called in one place
        self,
        *,
        worker_id: WorkerId,
        incarnation: Incarnation,
        kv_cache: KVCache,
        config: HandoffConfig,
        clock: Clock,
        post: Callable[[object], None],
        loop: asyncio.AbstractEventLoop,
        link_host: str = "127.0.0.1",
        model: str = "",
        factories: Mapping[str, LinkFactory] | None = None,
        trace: Callable[[str, HandoffKey, str], None] | None = None,
        source_host: SourceHost | None = None,
        sink_host: SinkHost | None = None,
    ) -> None:
        """`link_host` is the local address that links bind; `factories` replace the transports;
        `model`: see `exchange_hash`.

        Raises `ConfigError` if a staging buffer does not hold the KV of one token.
        """
        pools = kv_cache.rank_pools
        layout, on_cuda = kv_cache.layout, pools[0].buffer.is_cuda
        if config.staging_buffer_bytes < layout.bytes_per_token:
            raise ConfigError(
                "handoff.staging_buffer_bytes",
                f"is {config.staging_buffer_bytes}; one token has"
                f" {layout.bytes_per_token} bytes of KV",
            )
        hello = Hello(
            worker_id,
            incarnation,
            layout.exchange_hash(len(pools), model),
            config.staging_buffer_bytes,
            heads=layout.heads * len(pools),
            ranks=len(pools),
            host=host_fingerprint(config, on_cuda=on_cuda),
        )
        deadlines = build_deadlines(config.link_timeout_s)
        self._endpoint = Endpoint(hello, kv_cache, pools, config, clock, deadlines, trace)
        if factories is None:
            factories = build_factories(config, link_host, on_cuda=on_cuda)
        self._hub = SessionHub(hello, loop, post, factories, config.link_timeout_s, clock)
        self._source = SourceSide(self._endpoint)
        self._sink = SinkSide(self._endpoint, self._hub)
        self._address: str | None = None
        self.set_hosts(source_host, sink_host)
        self._handlers: dict[type, Callable[[Any], None]] = {
            SessionOpened: self._on_session_opened,
            MessageCame: self._on_message,
            SessionLost: self._on_session_lost,
            LinkBuilt: self._on_link_built,
            PayloadSent: self._source.payload_sent,
            ChunkTaken: self._sink.chunk_taken,
            LinkFailed: self._on_link_failed,
            ShowHandoffs: self._on_show_handoffs,
        }

    def set_hosts(
        self,
        source_host: SourceHost | None,
        sink_host: SinkHost | None,
        offer_host: OfferHost | None = None,
    ) -> None:
        """Before the first handoff: who computes prompts, who decodes, who takes KV back."""
        self._source.host = source_host
        self._sink.host = sink_host
        self._offer_host = offer_host

    def announce(self, address: str) -> None:
        """Where this worker serves sessions; until then it offers nothing."""
        self._address = address

    # --- sink side ---

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
        """Have `source` compute `prompt`, before those of others if it `goes_first`, and move its
        KV here.

        With `held_only` the source sends what its cache holds of the beginning, computes nothing
        and chooses no token. Ends in exactly one of `SinkHost.adopted` and `SinkHost.failed`,
        unless aborted. Raises `DuplicateRequest`, and nothing begins, if `key` has been fetched
        before.
        """
        self._sink.fetch(
            key, source, prompt, sampling, cache_use, held_only=held_only, goes_first=goes_first
        )

    def abort_fetch(self, key: HandoffKey, reason: str) -> None:
        """End it here and now. No callback follows; the host releases its slots itself."""
        self._sink.abort(key, reason)

    def offer(
        self, source: PrefillSource, key: HandoffKey, tokens: TokenIds, cache_use: CacheUse
    ) -> None:
        """Tell a worker that computed a prompt for us what it may fetch back, under `key`.

        Nothing comes of it, and it is counted, where there is no session with it any more.
        """
        session = self._sink.session_with(source)
        if session is None or self._address is None:
            self._endpoint.counters["offers_unsent"] += 1
            return
        self._endpoint.counters["offers_sent"] += 1
        session.send(KvOffer(key, self._address, tokens, cache_use))

    # --- source side ---

    def scheduled(self, key: HandoffKey, kv: RequestKV, hit_tokens: int) -> None:
        """The prompt has a row and slots, `hit_tokens` of it cached in any tier. Pins `kv`."""
        self._source.scheduled(key, kv, hit_tokens)

    def held(self, key: HandoffKey, kv: RequestKV) -> None:
        """What is committed of `kv` is what this worker holds of a `held_only` prompt. Pins it."""
        self._source.held(key, kv)

    def computing(self, key: HandoffKey, tokens: int, layers: int) -> None:
        """A step has written tokens [0, tokens) in layers [0, layers): those may leave."""
        self._source.computing(key, tokens, layers)

    def computed(self, key: HandoffKey, tokens: int) -> None:
        """`kv.committed_len` has reached `tokens`: they may leave."""
        self._source.computed(key, tokens)

    def finished(self, key: HandoffKey, first_tokens: tuple[OutputToken, ...]) -> None:
        """The prompt is computed, and these are the tokens after it, one per sample."""
        self._source.finished(key, first_tokens)

    def abort_source(self, key: HandoffKey, reason: str) -> None:
        """Our own failure. Unpins; no callback follows; the host releases its slots itself."""
        self._source.abort(key, reason)

    # --- plumbing ---

    def handle(self, event: object) -> bool:
        """Take an event that came through `post`; False if it is not the driver's."""
        handler = self._handlers.get(type(event))
        if handler is None:
            return False
        handler(event)
        return True

    def tick(self) -> None:
        """Do what is due: repeated offers, deadlines."""
        self._source.on_time()
        self._sink.on_time()

    def next_deadline(self) -> float | None:
        """When `tick` has to be called next, on the clock's scale; None if nothing is open."""
        times = (self._source.wakes_at(), self._sink.wakes_at())
        return min((time for time in times if time is not None), default=None)

    def handoffs_open(self) -> int:
        """Handoffs that have not ended, of both sides."""
        return len(self._source) + len(self._sink)

    @property
    def counters(self) -> Mapping[str, int]:
        """What happened since the start."""
        return self._endpoint.counters

    @property
    def link_bytes_per_s(self) -> float:
        """Measured rate of the links into this worker while busy; 0 before the first payload."""
        return self._sink.rate.bytes_per_s

    def flush(self) -> None:
        """Nothing is gathered: messages and payloads leave as they are made."""

    def stop(self, error: KvferryError) -> None:
        """Tell every peer by ending its session. Touches no KV: the process ends with this."""
        self._hub.close(str(error))

    def close(self) -> None:
        """End every handoff and session. `wait_closed` on the loop waits for the sessions."""
        reason = "the worker stops"
        self._source.close(reason)
        self._sink.close(reason)
        self._hub.close(reason)

    # --- loop thread ---

    def servicer(self) -> HandoffServicer:
        """The gRPC service to add to the worker's server (with `SESSION_SERVER_OPTIONS`)."""
        return HandoffServicer(self._hub)

    async def wait_closed(self) -> None:
        """Until the sessions it opened and all link threads have ended. After `close` or `stop`."""
        await self._hub.wait_closed()

    # --- inside ---

    def _on_session_opened(self, event: SessionOpened) -> None:
        if event.session.is_source:
            self._source.session_opened(event.session, event.peer)

    def _on_session_lost(self, event: SessionLost) -> None:
        if event.session.is_source:
            self._source.session_lost(event.session, event.reason)
        else:
            self._sink.session_lost(event.session, event.reason)

    def _on_link_built(self, event: LinkBuilt) -> None:
        side = self._source if event.session.is_source else self._sink
        side.link_built(event)

    def _on_link_failed(self, event: LinkFailed) -> None:
        side = self._source if event.session.is_source else self._sink
        side.link_failed(event.session, event.generation, event.reason)

    def _on_show_handoffs(self, event: ShowHandoffs) -> None:
        views = [*self._source.views(), *self._sink.views()]
        views.sort(key=lambda view: -view.age_s)
        event.deliver(tuple(views[:HANDOFFS_SHOWN_MAX]))

    def _on_message(self, event: MessageCame) -> None:
        """A source hears only what sinks say, and a sink what sources say."""
        session, message = event.session, event.message
        match message:
            case Abort() | Aborted() | LinkDown():
                side = self._source if session.is_source else self._sink
                side.on_message(session, message)
            case Prefill() | Grant() | Busy() | Received() if session.is_source:
                self._source.on_message(session, message)
            case Ready() | FirstToken() | Complete() | Closed() | LinkRendezvous() if (
                not session.is_source
            ):
                self._sink.on_message(session, message)
            case KvOffer() if session.is_source:
                self._on_offer(session, message)
            case LinkRendezvous() | LinkSignal():
                """The loop thread has given it to the link."""
            case _:
                self._endpoint.counters["illegal_messages"] += 1
                session.close(f"{type(message).__name__} from the wrong side")

    def _on_offer(self, session: Session, offer: KvOffer) -> None:
        """Whoever offers is the source of what it offers, and we would be the sink."""
        counters, peer = self._endpoint.counters, self._source.peer_of(session)
        if peer is None:
            counters["late_messages"] += 1
            return
        pair = (offer.key.source_incarnation, offer.key.sink_incarnation)
        if pair != (peer.incarnation, self._endpoint.hello.incarnation):
            counters["illegal_messages"] += 1
            return
        holder = PrefillSource(peer.worker_id, offer.address, peer.incarnation)
        taken = self._offer_host is not None and self._offer_host.offered(offer, holder)
        counters["offers_taken" if taken else "offers_declined"] += 1
