"""Two workers' handoff drivers in one process: real sessions over loopback, real or fake links.

The test's thread is the engine thread of both workers, so that a test decides who moves next.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import grpc
import numpy as np
import torch

from kv_transfer.driver import HandoffDriver
from kv_transfer.protocol.key import HandoffKey
from kv_transfer.session import SESSION_SERVER_OPTIONS
from kvferry.cache_key import CacheUse
from kvferry.clock import MonotonicClock
from kvferry.config import CacheConfig, HandoffConfig, KvDType
from kvferry.generation import OutputToken, PrefillSource
from kvferry.ids import Attempt, ExtraKey, Incarnation, RequestId, WorkerId
from kvferry.rpc.v1 import handoff_pb2_grpc as rpc
from kvferry.sampling import SamplingParams
from mem_cache.errors import OutOfRows, OutOfSlots
from mem_cache.factory import add_rank_pools, assemble_kv_cache
from mem_cache.layout import KvLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kv_transfer.links.interface import LinkFactory
    from kvferry.errors import KvferryError
    from kvferry.generation import AttemptUsage
    from kvferry.ids import TokenIds
    from mem_cache.kv_cache import KVCache
    from mem_cache.request_kv import RequestKV

NO_KEY = ExtraKey("")
PLAIN_USE = CacheUse(NO_KEY)
FIRST_TOKEN = OutputToken(7)
PATIENCE_S = 60.0


def small_layout(page_size: int = 4, num_layers: int = 3) -> KvLayout:
    return KvLayout(
        num_layers, num_kv_heads=2, head_dim=8, dtype=KvDType.FLOAT32, page_size=page_size
    )


def small_cache(layout: KvLayout, num_slots: int = 512, rows: int = 16, ranks: int = 1) -> KVCache:
    """`layout`: of the whole worker, whose heads the ranks share."""
    config = CacheConfig(page_size=layout.page_size, rows=rows, audit=True)
    of_rank = dataclasses.replace(layout, num_kv_heads=layout.num_kv_heads // ranks)
    cache = assemble_kv_cache(of_rank, config, num_slots, context_length=256)
    add_rank_pools(cache, ranks)
    return cache


class LoopThread:
    """An asyncio loop on a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE_S)
        self.loop.close()


class RecordingSource:
    """A source's host: queues prompts; the test computes them."""

    def __init__(self, worker: TestWorker) -> None:
        self._worker = worker
        self.queue: dict[HandoffKey, TokenIds] = {}
        self.kvs: dict[HandoffKey, RequestKV] = {}
        self.prompts: dict[HandoffKey, TokenIds] = {}
        self.ends: dict[HandoffKey, str] = {}
        self.refusal: KvferryError | None = None

    def start(self, key, prompt, sampling, cache_use, goes_first) -> None:
        if self.refusal is not None:
            raise self.refusal
        assert key not in self.prompts
        self.queue[key] = self.prompts[key] = prompt

    def cancel(self, key, reason) -> None:
        self._end(key, f"cancelled: {reason}")

    def closed(self, key) -> None:
        self._end(key, "closed")

    def _end(self, key, how) -> None:
        assert key not in self.ends, "two ends"
        self.ends[key] = how
        self.queue.pop(key, None)
        self.release(key)

    def release(self, key) -> None:
        kv = self.kvs.pop(key, None)
        if kv is not None:
            self._worker.kv_cache.release(kv, self.prompts[key])

    # --- what a scheduler would do ---

    def schedule(self, key) -> None:
        cache, prompt = self._worker.kv_cache, self.queue.pop(key)
        kv = cache.open(str(key), prompt, NO_KEY)
        cache.extend(kv, len(prompt))
        self.kvs[key] = kv
        self._worker.driver.scheduled(key, kv, kv.prefix_len)

    def compute(self, key, tokens) -> None:
        cache, kv, prompt = self._worker.kv_cache, self.kvs[key], self.prompts[key]
        fill_kv(cache, kv, prompt, kv.committed_len, tokens)
        cache.commit(kv, tokens)
        self._worker.driver.computed(key, tokens)

    def finish(self, key, token=FIRST_TOKEN) -> None:
        self._worker.driver.finished(key, (token,))

    def abort(self, key, reason) -> None:
        self._worker.driver.abort_source(key, reason)
        self.ends[key] = f"own failure: {reason}"
        self.queue.pop(key, None)
        self.release(key)

    def serve(self, key, chunk=16) -> None:
        """Schedule, compute and finish in one go."""
        self.schedule(key)
        prompt = self.prompts[key]
        for stop in [*range(chunk, len(prompt), chunk), len(prompt)]:
            if key in self.kvs and stop > self.kvs[key].committed_len:
                self.compute(key, stop)
        if key in self.kvs:
            self.finish(key)


class RecordingSink:
    """A sink's host: reserves, and keeps what it adopts until the test releases it."""

    def __init__(self, worker: TestWorker) -> None:
        self._worker = worker
        self.prompts: dict[HandoffKey, TokenIds] = {}
        self.kvs: dict[HandoffKey, RequestKV] = {}
        self.tokens: dict[HandoffKey, tuple[OutputToken, ...]] = {}
        self.adopted_usage: dict[HandoffKey, AttemptUsage] = {}
        self.errors: dict[HandoffKey, KvferryError] = {}
        self.busy = 0
        self.log: list[str] = []

    def reserve(self, key, prompt_tokens):
        if self.busy:
            self.busy -= 1
            self.log.append("busy")
            return None
        cache, prompt = self._worker.kv_cache, self.prompts[key]
        try:
            kv = cache.open(str(key), prompt, NO_KEY, inbound=True)
        except OutOfRows:
            return None
        try:
            cache.extend(kv, prompt_tokens)
        except OutOfSlots:
            cache.release(kv, None)
            return None
        self.kvs[key] = kv
        self.log.append("reserved")
        return kv

    def first_tokens(self, key, tokens) -> None:
        assert key not in self.tokens
        self.tokens[key] = tokens
        self.log.append("first tokens")

    def adopted(self, key, usage) -> None:
        self._end(key)
        self.adopted_usage[key] = usage
        self.log.append("adopted")

    def failed(self, key, error) -> None:
        self._end(key)
        self.errors[key] = error
        self.log.append("failed")
        kv = self.kvs.pop(key, None)
        if kv is not None:
            self._worker.kv_cache.release(kv, None)

    def _end(self, key) -> None:
        assert key not in self.adopted_usage, "two ends"
        assert key not in self.errors, "two ends"

    def abort(self, key, reason) -> None:
        self._worker.driver.abort_fetch(key, reason)
        self._end(key)
        kv = self.kvs.pop(key, None)
        if kv is not None:
            self._worker.kv_cache.release(kv, None)

    def release(self, key) -> None:
        self._worker.kv_cache.release(self.kvs.pop(key), self.prompts[key])


class TestWorker:
    """A driver with its pools, hosts, inbox and gRPC server."""

    __test__ = False

    def __init__(
        self,
        name: str,
        incarnation: int,
        loop: LoopThread,
        kv_cache: KVCache,
        config: HandoffConfig,
        factories: Mapping[str, LinkFactory] | None = None,
        model: str = "",
    ) -> None:
        self.inbox: SimpleQueue[object] = SimpleQueue()
        self.worker_id = WorkerId(name)
        self.incarnation = Incarnation(incarnation)
        self.kv_cache = kv_cache
        self.source = RecordingSource(self)
        self.sink = RecordingSink(self)
        self._loop = loop
        self.driver = HandoffDriver(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            kv_cache=kv_cache,
            config=config,
            clock=MonotonicClock(),
            post=self.inbox.put,
            loop=loop.loop,
            factories=factories,
            model=model,
            source_host=self.source,
            sink_host=self.sink,
        )
        self._server: grpc.aio.Server | None = None
        self.address = loop.call(self._serve())

    async def _serve(self) -> str:
        self._server = grpc.aio.server(options=SESSION_SERVER_OPTIONS)
        rpc.add_HandoffServicer_to_server(self.driver.servicer(), self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return f"127.0.0.1:{port}"

    def as_source(self) -> PrefillSource:
        return PrefillSource(self.worker_id, self.address, self.incarnation)

    def step(self) -> bool:
        """Handle one event if there is one."""
        self.driver.tick()
        try:
            event = self.inbox.get_nowait()
        except Empty:
            return False
        assert self.driver.handle(event)
        return True

    def stop_server(self) -> None:
        """As if the process died: every session of this server breaks."""
        if self._server is not None:
            self._loop.call(self._server.stop(None))
            self._server = None

    def close(self) -> None:
        self.driver.close()
        self._loop.call(self.driver.wait_closed())
        self.stop_server()


class HandoffPair:
    """A prefill worker and a decode worker."""

    def __init__(
        self,
        *,
        layout: KvLayout | None = None,
        config: HandoffConfig | None = None,
        factories: Mapping[str, LinkFactory] | None = None,
        sink_layout: KvLayout | None = None,
        sink_config: HandoffConfig | None = None,
        ranks: tuple[int, int] = (1, 1),
        models: tuple[str, str] = ("", ""),
    ) -> None:
        """`ranks`, `models`: of source and sink; the layouts are those of whole workers."""
        layout = layout or small_layout()
        self.config = config or HandoffConfig(
            staging_buffer_bytes=8 * layout.bytes_per_token,
            staging_buffers=3,
            checksums=True,
            link_timeout_s=5.0,
        )
        self.factories = factories
        self.loop = LoopThread()
        self.prefill = TestWorker(
            "prefill-0",
            101,
            self.loop,
            small_cache(layout, ranks=ranks[0]),
            self.config,
            factories,
            models[0],
        )
        self.decode = TestWorker(
            "decode-0",
            202,
            self.loop,
            small_cache(sink_layout or layout, ranks=ranks[1]),
            sink_config or self.config,
            factories,
            models[1],
        )

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()
        self.loop.stop()

    def key(self, name: str, attempt: int = 1) -> HandoffKey:
        return HandoffKey(
            RequestId(name), Attempt(attempt), self.prefill.incarnation, self.decode.incarnation
        )

    def fetch(self, name: str, prompt: TokenIds, attempt: int = 1) -> HandoffKey:
        key = self.key(name, attempt)
        self.decode.sink.prompts[key] = prompt
        self.decode.driver.fetch(key, self.prefill.as_source(), prompt, SamplingParams(), PLAIN_USE)
        return key

    def until(self, condition: Callable[[], object]) -> None:
        """Let both engines handle events until `condition` holds."""
        self._until(condition, self.prefill, self.decode)

    def until_only(self, worker: TestWorker, condition: Callable[[], object]) -> None:
        """As `until`, with the other worker's engine standing still."""
        self._until(condition, worker)

    def _until(self, condition: Callable[[], object], *workers: TestWorker) -> None:
        clock, pause = MonotonicClock(), threading.Event()
        end = clock.now() + PATIENCE_S
        while not condition():
            moved = [worker.step() for worker in workers]
            if not any(moved):
                assert clock.now() < end, "it never happened"
                pause.wait(0.001)

    def run(self, name: str, prompt: TokenIds) -> HandoffKey:
        """A whole handoff without trouble."""
        key = self.fetch(name, prompt)
        self.until(lambda: key in self.prefill.source.queue)
        self.prefill.source.serve(key)
        self.until(lambda: key in self.decode.sink.adopted_usage)
        self.until(lambda: key in self.prefill.source.ends)
        return key

    def assert_idle(self) -> None:
        for worker in (self.prefill, self.decode):
            assert worker.driver.handoffs_open() == 0
            accounts = worker.kv_cache.accounts()
            assert accounts.is_idle, accounts
            worker.kv_cache.audit()


def state_count(worker: TestWorker, state: str) -> int:
    """Open handoffs of a side and state: `source_queued`, `sink_receiving`, ..."""
    side, _, name = state.partition("_")
    handoffs = {"source": worker.driver._source, "sink": worker.driver._sink}[side]._handoffs
    return sum(handoff.core.state.value == name for handoff in handoffs.values())


def prompt_of(length: int, seed: int = 0) -> TokenIds:
    return np.random.default_rng(seed).integers(1, 1000, length, dtype=np.int32)


def expected_kv(cache: KVCache, prompt: TokenIds, start: int, stop: int) -> torch.Tensor:
    """The K/V of tokens [start, stop), of all ranks: [layers, 2, n, H, D].

    A function of token, position, layer, plane, head and element.
    """
    layout = cache.layout
    heads = layout.num_kv_heads * len(cache.rank_pools)
    shape = (layout.num_layers, 2, stop - start, heads, layout.head_dim)
    values = torch.arange(layout.num_layers * 2, dtype=torch.float32).view(-1, 2, 1, 1, 1) * 0.25
    tokens = torch.from_numpy(prompt[start:stop].astype(np.float32)).view(1, 1, -1, 1, 1)
    positions = torch.arange(start, stop, dtype=torch.float32).view(1, 1, -1, 1, 1)
    inner = torch.arange(heads * layout.head_dim, dtype=torch.float32)
    inner = inner.view(1, 1, 1, heads, layout.head_dim) / 64
    return (values + tokens + positions * 1000 + inner).expand(shape).contiguous()


def fill_kv(cache: KVCache, kv: RequestKV, prompt: TokenIds, start: int, stop: int) -> None:
    """Write the expected K/V to the slots, each rank its heads."""
    slots = torch.from_numpy(cache.slots(kv, start, stop))
    of_ranks = expected_kv(cache, prompt, start, stop).chunk(len(cache.rank_pools), dim=3)
    for pool, content in zip(cache.rank_pools, of_ranks, strict=True):
        for layer, (keys, values) in enumerate(content):
            pool.write(layer, slots, keys.contiguous(), values.contiguous())


def read_kv(cache: KVCache, kv: RequestKV, start: int, stop: int) -> torch.Tensor:
    """What the slots hold, of all ranks: [layers, 2, n, H, D]."""
    layout = cache.layout
    shape = (layout.num_layers, 2, stop - start, layout.num_kv_heads, layout.head_dim)
    of_ranks = []
    for pool in cache.rank_pools:
        out = torch.empty((stop - start) * layout.bytes_per_token, dtype=torch.uint8)
        pool.gather(cache.slots(kv, start, stop), layout.whole, out)
        of_ranks.append(out.view(torch.float32).view(shape))
    return torch.cat(of_ranks, dim=3)
