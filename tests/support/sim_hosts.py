"""The hosts of a simulated worker: they behave like its scheduler, and press for room."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.errors import InvalidInput, Overloaded
from kvferry.ids import ExtraKey
from mem_cache.errors import OutOfRows, OutOfSlots
from tests.support.sim_pool import LAYERS, POISON, content_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from kv_transfer.protocol.key import HandoffKey
    from kvferry.ids import SlotIndices, TokenIds
    from mem_cache.request_kv import RequestKV
    from tests.support.sim_worker import SimWorker

PLAIN = ExtraKey("")
PROMPT_MAX = 20
"""What fits the slots of every worker."""


class SimStore:
    """A worker's cache and pools together, as its model sees them."""

    def __init__(self, worker: SimWorker) -> None:
        self._worker = worker

    def open(self, name: str, prompt: TokenIds, *, inbound: bool = False) -> RequestKV | None:
        """A row and slots for the whole prompt; None without room."""
        cache = self._worker.kv_cache
        try:
            kv = cache.open(name, prompt, PLAIN, inbound=inbound)
        except OutOfRows:
            return None
        try:
            cache.extend(kv, len(prompt))
        except OutOfSlots:
            cache.release(kv, None)
            return None
        self.put(cache.slots(kv, kv.committed_len, kv.allocated_len), POISON)
        return kv

    def put(self, slots: SlotIndices, value: float) -> None:
        """Overwrite what these slots hold on all ranks."""
        for pool in self._worker.pools:
            pool.store[:, :, slots] = value

    def compute(
        self, kv: RequestKV, content: np.ndarray, stop: int, layers: tuple[int, int]
    ) -> None:
        """The model's work on tokens [committed_len, stop) in some layers.

        `content` is the whole prompt's, float32 [layers, planes, T, heads, D].
        """
        slots = self._worker.kv_cache.slots(kv, kv.committed_len, stop)
        part = content[layers[0] : layers[1], :, kv.committed_len : stop]
        heads = part.shape[3] // len(self._worker.pools)
        for rank, pool in enumerate(self._worker.pools):
            pool.put(slots, part[:, :, :, rank * heads : (rank + 1) * heads], layers[0])

    def is_whole(self, kv: RequestKV, content: np.ndarray, stop: int) -> bool:
        """Whether tokens [0, stop) have this KV, byte for byte, on all ranks."""
        slots = self._worker.kv_cache.slots(kv, 0, stop)
        content = content[:, :, :stop]
        heads = content.shape[3] // len(self._worker.pools)
        return all(
            (pool.get(slots) == content[:, :, :, rank * heads : (rank + 1) * heads]).all()
            for rank, pool in enumerate(self._worker.pools)
        )


class SimSourceHost:
    """Queues prompts, computes them chunk by chunk and layer by layer, checkpoints meanwhile."""

    def __init__(self, worker: SimWorker) -> None:
        self._worker = worker
        self.queue: dict[HandoffKey, TokenIds] = {}
        self.kvs: dict[HandoffKey, RequestKV] = {}
        self.prompts: dict[HandoffKey, TokenIds] = {}
        self.finished: set[HandoffKey] = set()
        self.ends: dict[HandoffKey, str] = {}

    # --- what the driver calls ---

    def start(self, key, prompt, sampling, cache_use, goes_first) -> None:
        """See `SourceHost`."""
        del cache_use, goes_first
        if self._worker.world.chance("refuse prompt"):
            raise Overloaded("the queue is full", 1.0)
        if len(prompt) > PROMPT_MAX or self._worker.world.chance("refuse prompt"):
            raise InvalidInput("prompt", "is too long")
        assert key not in self.prompts
        self._worker.world.know(key, prompt, sampling.n)
        self.queue[key] = self.prompts[key] = prompt

    def start_held(self, key, prompt, cache_use) -> None:
        """See `SourceHost`."""
        del cache_use
        cache = self._worker.kv_cache
        try:
            kv = cache.open(str(key), prompt, PLAIN)
        except OutOfRows:
            self._worker.world.has_faults = True
            raise Overloaded("no row", 1.0) from None
        if kv.committed_len == 0:
            cache.release(kv, None)
            self._worker.world.has_faults = True
            raise InvalidInput("prompt", "nothing of it is here")
        self.prompts[key], self.kvs[key] = prompt, kv
        self._worker.world.know(key, prompt, 0)
        self.finished.add(key)
        self._worker.driver.held(key, kv)

    def cancel(self, key, reason) -> None:
        """See `SourceHost`."""
        self._end(key, f"cancelled: {reason}")

    def closed(self, key) -> None:
        """See `SourceHost`."""
        self._end(key, "closed")

    # --- what the scheduler does ---

    def schedule(self, key: HandoffKey) -> None:
        """Give a queued prompt its row and slots, if there is room."""
        prompt = self.queue[key]
        kv = self._worker.store.open(str(key), prompt)
        if kv is None:
            return
        del self.queue[key]
        self.kvs[key] = kv
        self._worker.driver.scheduled(key, kv, kv.prefix_len)

    def compute(self, key: HandoffKey, stop: int) -> Iterator[None]:
        """One step of the engine; between two layers other threads may move."""
        worker, kv, prompt = self._worker, self.kvs[key], self.prompts[key]
        content = worker.world.requests[key].content
        for layer in range(LAYERS):
            worker.store.compute(kv, content, stop, (layer, layer + 1))
            if layer + 1 < LAYERS:
                worker.driver.computing(key, stop, layer + 1)
                yield
        worker.kv_cache.commit(kv, stop)
        worker.driver.computed(key, stop)
        if stop == len(prompt) and key in self.kvs:
            self.finish(key)

    def finish(self, key: HandoffKey) -> None:
        """The first tokens are sampled."""
        self.finished.add(key)
        request = self._worker.world.requests[key]
        self._worker.driver.finished(key, request.tokens)

    def checkpoint(self, key: HandoffKey) -> None:
        """Publish what is computed; the row may read other slots afterwards."""
        kv = self.kvs[key]
        self._worker.kv_cache.checkpoint(kv, self.prompts[key][: kv.committed_len])

    def abort(self, key: HandoffKey) -> None:
        """Our own failure."""
        self._worker.driver.abort_source(key, "own failure")
        self._end(key, "own failure")

    def _end(self, key: HandoffKey, how: str) -> None:
        self._worker.world.properties.ended(self._worker, "source", key, how)
        self.ends[key] = how
        self.queue.pop(key, None)
        kv = self.kvs.pop(key, None)
        if kv is not None:
            self._worker.kv_cache.release(kv, self.prompts[key])


class SimSinkHost:
    """Reserves, and keeps what it adopts until it has decoded it."""

    def __init__(self, worker: SimWorker) -> None:
        self._worker = worker
        self.prompts: dict[HandoffKey, TokenIds] = {}
        self.kvs: dict[HandoffKey, RequestKV] = {}
        self.told: set[HandoffKey] = set()
        self.adopted_keys: dict[HandoffKey, None] = {}
        self.ends: dict[HandoffKey, str] = {}

    # --- what the driver calls ---

    def reserve(self, key, prompt_tokens):
        """See `SinkHost`."""
        world = self._worker.world
        if world.chance("busy"):
            return None
        if world.chance("never room"):
            raise InvalidInput("prompt", "never fits")
        kv = self._worker.store.open(str(key), self.prompts[key][:prompt_tokens], inbound=True)
        if kv is not None:
            self.kvs[key] = kv
        return kv

    def first_tokens(self, key, tokens) -> None:
        """See `SinkHost`."""
        world = self._worker.world
        assert key not in self.told, f"first tokens of {key} twice"
        is_right = tokens == world.requests[key].tokens
        assert is_right or world.is_lying, f"other tokens than {key} has"
        self.told.add(key)
        if world.chance("refuse tokens"):
            raise InvalidInput("token", "is not one of the model's")

    def adopted(self, key, usage) -> None:
        """See `SinkHost`."""
        self._end(key, "adopted")
        self._worker.world.properties.adopted(self._worker, key, usage)
        self.adopted_keys[key] = None

    def failed(self, key, error) -> None:
        """See `SinkHost`."""
        self._end(key, f"failed: {error}")
        self._release(key, None)

    # --- what the scheduler does ---

    def abort(self, key: HandoffKey) -> None:
        """The client has left."""
        self._worker.driver.abort_fetch(key, "the client left")
        self._end(key, "own abort")
        self._release(key, None)

    def finish(self, key: HandoffKey) -> None:
        """The adopted request has been decoded."""
        del self.adopted_keys[key]
        self._worker.world.properties.read(self._worker, key)
        self._release(key, self.prompts[key])

    def _release(self, key: HandoffKey, publish: TokenIds | None) -> None:
        kv = self.kvs.pop(key, None)
        if kv is not None:
            self._worker.kv_cache.release(kv, publish)

    def _end(self, key: HandoffKey, how: str) -> None:
        self._worker.world.properties.ended(self._worker, "sink", key, how)
        self.ends[key] = how


class SimFillers:
    """Other requests of the same worker: they take what comes free at once, and write to it."""

    def __init__(self, worker: SimWorker) -> None:
        self._worker = worker
        self.live: list[tuple[RequestKV, TokenIds, np.ndarray]] = []

    def open(self, name: str, prompt: TokenIds) -> None:
        """Take slots and fill them, if there is room."""
        kv = self._worker.store.open(name, prompt)
        if kv is None:
            return
        content = content_of(prompt, self._worker.world.setup.heads)
        self._worker.store.compute(kv, content, len(prompt), (0, LAYERS))
        self._worker.kv_cache.commit(kv, len(prompt))
        self.live.append((kv, prompt, content))

    def close(self, publish: bool) -> None:
        """End the oldest, whose KV nobody else may have touched."""
        kv, prompt, content = self.live.pop(0)
        assert self._worker.store.is_whole(kv, content, len(prompt)), (
            f"P2: somebody wrote into slots of {kv.request_id}"
        )
        self._worker.kv_cache.release(kv, prompt if publish else None)
