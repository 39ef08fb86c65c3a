"""One simulated worker process: real driver and cache, three threads that move when told."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, cast

from kv_transfer.driver import HandoffDriver
from kv_transfer.events import SessionLost
from kv_transfer.session_links import LinkCensus, LinkSettings
from kvferry.config import CacheConfig, HandoffConfig
from kvferry.generation import PrefillSource
from kvferry.ids import Incarnation, WorkerId
from mem_cache.factory import assemble_kv_cache
from tests.support.sim_hosts import SimFillers, SimSinkHost, SimSourceHost, SimStore
from tests.support.sim_link import SimLinkFactory, SimReceiver, SimSender
from tests.support.sim_pool import HEAD_DIM, LAYERS, PLANES, SimPool, sim_layout
from tests.support.sim_session import Pair

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator

    from kv_transfer.protocol.key import HandoffKey
    from kvferry.ids import SlotIndices
    from tests.support.sim_session import SimSession
    from tests.support.sim_world import SimWorld, WorkerSetup

LINK_TIMEOUT_S = 20.0


class _NoLoop:
    def is_closed(self) -> bool:
        return True


class SimWorker:
    """A process. After `die` nothing of it moves, and nobody looks at its accounts."""

    def __init__(self, world: SimWorld, name: str, incarnation: int, setup: WorkerSetup) -> None:
        self.world = world
        self.name = name
        self.setup = setup
        self.incarnation = Incarnation(incarnation)
        self.is_alive = True
        self.is_frozen = False
        self.can_move = True
        """Whether its threads run."""
        self.is_paused = False
        """A script holds the engine in the midst of a step."""
        self.inbox: deque[object] = deque()
        self.loop_calls: deque[tuple[Callable[..., None], tuple[object, ...]]] = deque()
        self.step: Iterator[None] | None = None
        """A step of the engine that has begun."""
        self.sessions: list[SimSession] = []
        self.link_ends: list[SimSender | SimReceiver] = []
        heads = world.setup.heads // setup.ranks
        self.kv_cache = _new_cache(setup, heads)
        pools = (
            SimPool(sim_layout(heads, setup.page_size), setup.slots) for _ in range(setup.ranks)
        )
        self.pools = tuple(pools)
        self.kv_cache.pool, self.kv_cache.rank_pools = self.pools[0], self.pools
        self.kv_cache._changed = self._cache_changed
        self.is_cache_changed = False
        self.store = SimStore(self)
        self.source, self.sink = SimSourceHost(self), SimSinkHost(self)
        self.fillers = SimFillers(self)
        factory = SimLinkFactory(self)
        factories = dict.fromkeys(("gloo", "shared_memory", "memory", "nccl"), factory)
        token_bytes = LAYERS * PLANES * heads * HEAD_DIM * 4
        config = HandoffConfig(
            staging_buffer_bytes=setup.buffer_tokens * token_bytes,
            checksums=world.setup.checksums,
            links_max=world.setup.links_max,
            link_timeout_s=LINK_TIMEOUT_S,
        )
        self.census = LinkCensus()
        self.link_settings = LinkSettings(
            factories, LINK_TIMEOUT_S, self.post, world.clock, self.census
        )
        self.driver = HandoffDriver(
            worker_id=WorkerId(name),
            incarnation=self.incarnation,
            kv_cache=self.kv_cache,
            config=config,
            clock=world.clock,
            post=self.post,
            loop=cast("asyncio.AbstractEventLoop", _NoLoop()),
            factories=factories,
            trace=self._trace,
            source_host=self.source,
            sink_host=self.sink,
        )
        self.driver._sink._hub = self

    def as_source(self) -> PrefillSource:
        """This process, as the router names it."""
        return PrefillSource(WorkerId(self.name), self.name, self.incarnation)

    def freeze(self, is_frozen: bool) -> None:
        """SIGSTOP or SIGCONT."""
        self.is_frozen = is_frozen
        self.can_move = self.is_alive and not is_frozen

    def is_free(self, slots: SlotIndices) -> set[int]:
        """Which of these slots have no owner."""
        return set(slots.tolist()) & set(self.kv_cache.allocator.free_slots().tolist())

    # --- the engine thread ---

    @property
    def may_act(self) -> bool:
        """Whether the engine runs."""
        return self.can_move and not self.is_paused

    def connect(self, source: PrefillSource) -> SimSession:
        """The driver's session hub is the world."""
        pair = Pair(self, source, self.world.next_number())
        self.world.pairs.append(pair)
        self.sessions.append(pair.sink)
        return pair.sink

    def engine_move(self) -> None:
        """Go on with the step that has begun, or handle one event."""
        if self.step is not None:
            if next(self.step, self) is self:
                self.step = None
            return
        event = self.inbox.popleft()
        assert self.driver.handle(event)
        if isinstance(event, SessionLost):
            self.world.properties.session_lost(self, event.session)

    def begin_step(self, step: Iterator[None]) -> None:
        """The engine computes; it handles no event before that has ended."""
        assert self.step is None
        self.step = step
        self.engine_move()

    def post(self, event: object) -> None:
        """From any thread to the engine."""
        if self.is_alive:
            self.inbox.append(event)

    # --- the loop thread ---

    def on_loop(self, function: Callable[..., None], *args: object) -> None:
        """From any thread to the loop."""
        if self.is_alive:
            self.loop_calls.append((function, args))

    def loop_move(self) -> None:
        """One callback."""
        function, args = self.loop_calls.popleft()
        function(*args)

    # --- the process ---

    def die(self) -> None:
        """SIGKILL."""
        self.is_alive = self.can_move = False
        self.inbox.clear()
        self.loop_calls.clear()
        self.link_ends.clear()
        self.step = None
        for session in list(self.sessions):
            session.pair.sever(self.world.some_of)
            session.is_lost = True
        self.sessions.clear()

    def _cache_changed(self, kv: object = None) -> None:
        del kv
        self.is_cache_changed = True

    def _trace(self, side: str, key: HandoffKey, state: str) -> None:
        self.world.properties.entered(self, side, key, state)


def _new_cache(setup: WorkerSetup, heads: int):
    layout = sim_layout(heads, setup.page_size)
    config = CacheConfig(page_size=setup.page_size, rows=setup.rows)
    return assemble_kv_cache(layout, config, setup.slots, context_length=64)
