"""A world in which decode workers offer back what they have, and whoever hears of it fetches it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kv_transfer.protocol.key import HandoffKey
from kv_transfer.protocol.messages import KvOffer
from kvferry.cache_key import CacheUse
from kvferry.errors import Overloaded
from kvferry.ids import ExtraKey
from kvferry.sampling import SamplingParams
from tests.support.sim_hosts import SimSinkHost
from tests.support.sim_pool import LAYERS, content_of
from tests.support.sim_run import SimRun
from tests.support.sim_world import Request, SimWorld

if TYPE_CHECKING:
    from kv_transfer.protocol.messages import SessionMessage
    from kvferry.generation import PrefillSource
    from tests.support.sim_worker import SimWorker
    from tests.support.sim_world import WorkerSetup

_PLAIN = CacheUse(ExtraKey(""))
_BACK = "-back"


class ReturningRun(SimRun):
    """A seeded run in such a world."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.world: SimWorld = ReturningWorld(self.world.setup, self.rng)


class ReturningWorld(SimWorld):
    """Every other turn is offered."""

    def remember(self, message: SessionMessage) -> None:
        """An offer is never old: it belongs to no handoff."""
        if not isinstance(message, KvOffer):
            super().remember(message)

    def _new_worker(self, name: str, setup: WorkerSetup) -> SimWorker:
        worker = super()._new_worker(name, setup)
        sink = worker.sink = ReturningSink(worker)
        worker.driver.set_hosts(worker.source, sink, sink)
        worker.driver.announce(worker.name)
        return worker


class ReturningSink(SimSinkHost):
    """Decodes, offers, and takes what others offer. Returns are adopted like all that is fetched,
    and may be aborted by their host at any time."""

    def finish(self, key: HandoffKey) -> None:
        """The adopted request has been decoded; perhaps its answer is offered."""
        super().finish(key)
        world = self._worker.world
        if not key.request_id.endswith(_BACK) and world.rng.random() < 0.5:
            self._offer(key)

    def _offer(self, key: HandoffKey) -> None:
        worker, world = self._worker, self._worker.world
        answer = [world.rng.randint(1, 200) for _ in range(world.rng.randint(1, 6))]
        tokens = np.concatenate((self.prompts[key], np.asarray(answer, np.int32)))
        kv = worker.store.open(f"answer {world.next_number()}", tokens)
        if kv is not None:
            content = content_of(tokens, world.setup.heads)
            worker.store.compute(kv, content, len(tokens), (0, LAYERS))
            worker.kv_cache.commit(kv, len(tokens))
            worker.kv_cache.release(kv, tokens)
        name = type(key.request_id)(f"{key.request_id}{_BACK}")
        back = HandoffKey(name, key.attempt, key.sink_incarnation, key.source_incarnation)
        source = world.by_incarnation[key.source_incarnation]
        worker.driver.offer(source.as_source(), back, tokens, _PLAIN)

    def offered(self, offer: KvOffer, holder: PrefillSource) -> bool:
        """See `OfferHost`. Whatever was not offered before is fetched."""
        key, world = offer.key, self._worker.world
        if key in self.prompts:
            return False
        content = content_of(offer.tokens, world.setup.heads)
        world.requests[key] = Request(key.request_id, offer.tokens, content, (), held_only=True)
        self.prompts[key] = offer.tokens
        self._worker.driver.fetch(
            key, holder, offer.tokens, SamplingParams(), offer.cache_use, held_only=True
        )
        return True

    def reserve(self, key, prompt_tokens):
        """See `SinkHost`. A return does not wait."""
        kv = super().reserve(key, prompt_tokens)
        if kv is None and key.request_id.endswith(_BACK):
            self._worker.world.has_faults = True
            raise Overloaded("no room for KV that is given back", 1.0)
        return kv
