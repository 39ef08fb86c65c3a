"""The whole handoff between two processes against raw Gloo between the same two.

A handoff is timed at the sink from the grant to the commit: gather, send, receive, scatter. Raw is
one Gloo message of the same bytes, timed at the sink from its word to start to the last byte. Both
alternate, so that a busy machine slows both. Figures are medians.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import tempfile
import threading
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import torch
from torch.distributed import FileStore, ProcessGroupGloo

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
from mem_cache.factory import assemble_kv_cache
from mem_cache.layout import KvLayout

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from kvferry.errors import KvferryError
    from kvferry.generation import AttemptUsage
    from kvferry.ids import TokenIds
    from mem_cache.request_kv import RequestKV

MIB = 2**20
PAYLOADS = (1 * MIB, 16 * MIB, 64 * MIB)
ROUNDS = 9

LAYOUT = KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, dtype=KvDType.FLOAT32, page_size=16)
"""SmolLM2-135M: 46,080 bytes a token."""

_SOURCE, _SINK = Incarnation(1), Incarnation(2)
_NO_KEY = ExtraKey("")
_WAIT_S = 60.0
_TOKENS_MAX = 1600


@dataclass(frozen=True, slots=True)
class _Command:
    what: str
    tokens: int
    address: str = ""


def measure(rounds: int) -> Iterator[dict[str, object]]:
    """One record per payload size."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store_path = str(Path(folder) / "store")
        ends = {rank: context.Pipe() for rank in (0, 1)}
        processes = [
            context.Process(target=_run_worker, args=(rank, ends[rank][1], store_path))
            for rank in (0, 1)
        ]
        for process in processes:
            process.start()
        source, sink = ends[0][0], ends[1][0]
        try:
            address = _receive(source)
            _receive(sink)
            for payload_bytes in PAYLOADS:
                yield _measure_size(source, sink, address, payload_bytes, rounds)
        finally:
            for end in (source, sink):
                end.send(_Command("stop", 0))
            for process in processes:
                process.join(_WAIT_S)


def _measure_size(
    source: Connection, sink: Connection, address: str, size: int, rounds: int
) -> dict[str, object]:
    tokens = round(size / LAYOUT.bytes_per_token)
    payload_bytes = tokens * LAYOUT.bytes_per_token
    seconds: dict[str, list[float]] = {"raw": [], "handoff": []}
    # The first round builds the link, touches the memory, and is not counted.
    for turn in range(rounds + 1):
        for what in ("raw", "handoff"):
            source.send(_Command(what, tokens))
            sink.send(_Command(what, tokens, address))
            taken = _receive(sink)
            _receive(source)
            if turn > 0:
                seconds[what].append(taken)
    handoff = payload_bytes / statistics.median(seconds["handoff"]) / 1e9
    raw = payload_bytes / statistics.median(seconds["raw"]) / 1e9
    return {
        "kind": "transfer",
        "payload_bytes": payload_bytes,
        "handoff_GBps": round(handoff, 3),
        "raw_GBps": round(raw, 3),
        "ratio": round(handoff / raw, 3),
    }


def _receive(end: Connection) -> Any:
    if not end.poll(_WAIT_S):
        raise TimeoutError("a benchmark worker does not answer")
    return end.recv()


# --- in the workers ---------------------------------------------------------------------------


class _Worker:
    """A handoff driver, a raw group, and hosts that compute nothing."""

    def __init__(self, rank: int, end: Connection, store_path: str) -> None:
        self.rank = rank
        self.end = end
        self.inbox: SimpleQueue[object] = SimpleQueue()
        self.kv_cache = assemble_kv_cache(
            LAYOUT, CacheConfig(page_size=LAYOUT.page_size, rows=8), 2 * _TOKENS_MAX, 2048
        )
        # Every page of the pool is touched, so that no round pays for the first use of memory.
        self.kv_cache.pool.buffer.fill_(float(rank))
        self.raw_buffer = torch.zeros(_TOKENS_MAX * LAYOUT.bytes_per_token, dtype=torch.uint8)
        self.raw_group = _raw_group(rank, store_path)
        self.kv: RequestKV | None = None
        self.clock = MonotonicClock()
        self.count = 0
        self.granted_at = 0.0
        self.loop = asyncio.new_event_loop()
        self.loop_thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.loop_thread.start()
        self.driver = HandoffDriver(
            worker_id=WorkerId(f"worker-{rank}"),
            incarnation=(_SOURCE, _SINK)[rank],
            kv_cache=self.kv_cache,
            config=HandoffConfig(),
            clock=self.clock,
            post=self.inbox.put,
            loop=self.loop,
            source_host=self,
            sink_host=self,
        )

    async def serve(self) -> str:
        """Start the gRPC server; its address."""
        self.server = grpc.aio.server(options=SESSION_SERVER_OPTIONS)
        rpc.add_HandoffServicer_to_server(self.driver.servicer(), self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        return f"127.0.0.1:{port}"

    def run(self) -> None:
        """The engine thread: commands of the benchmark and events of the driver."""
        self.end.send(asyncio.run_coroutine_threadsafe(self.serve(), self.loop).result(_WAIT_S))
        threading.Thread(target=self._read_commands, daemon=True).start()
        while True:
            event = self.inbox.get()
            match event:
                case _Command("stop"):
                    self.driver.close()
                    stopping = asyncio.run_coroutine_threadsafe(self._stop(), self.loop)
                    stopping.result(_WAIT_S)
                    self.loop.call_soon_threadsafe(self.loop.stop)
                    self.loop_thread.join(_WAIT_S)
                    del self.raw_group
                    return
                case _Command("raw", tokens):
                    self.end.send(self._raw(tokens * LAYOUT.bytes_per_token))
                case _Command("handoff", tokens, address):
                    if self.rank == 1:
                        self._fetch(tokens, address)
                case _:
                    self.driver.handle(event)

    async def _stop(self) -> None:
        await self.driver.wait_closed()
        await self.server.stop(None)

    def _read_commands(self) -> None:
        command = _Command("", 0)
        while command.what != "stop":
            command = self.end.recv()
            self.inbox.put(command)

    def _raw(self, payload_bytes: int) -> float:
        payload, word = self.raw_buffer[:payload_bytes], torch.zeros(1, dtype=torch.uint8)
        started = self.clock.now()
        if self.rank == 0:
            self.raw_group.recv([word], 1, 1).wait()
            self.raw_group.send([payload], 1, 2).wait()
        else:
            arrival = self.raw_group.recv([payload], 0, 2)
            self.raw_group.send([word], 0, 1).wait()
            arrival.wait()
        return self.clock.now() - started

    def _fetch(self, tokens: int, address: str) -> None:
        self.count += 1
        key = HandoffKey(RequestId(f"r{self.count}"), Attempt(1), _SOURCE, _SINK)
        source = PrefillSource(WorkerId("worker-0"), address, _SOURCE)
        prompt = np.arange(tokens, dtype=np.int32)
        self.driver.fetch(key, source, prompt, SamplingParams(), CacheUse(_NO_KEY))

    # --- source's host ---

    def start(
        self, key: HandoffKey, prompt: TokenIds, sampling: SamplingParams, cache_use: CacheUse
    ) -> None:
        """All of the prompt counts as computed at once."""
        del sampling
        self.kv = self._open(key, prompt, cache_use.extra_key, inbound=False)
        self.kv_cache.commit(self.kv, len(prompt))
        self.driver.scheduled(key, self.kv, 0)
        self.driver.computed(key, len(prompt))
        self.driver.finished(key, OutputToken(1))

    def closed(self, key: HandoffKey) -> None:
        """Nothing is published, so that the next prompt hits nothing."""
        del key
        self._release()
        self.end.send("closed")

    def cancel(self, key: HandoffKey, reason: str) -> None:
        """The benchmark is broken."""
        raise RuntimeError(f"{key}: {reason}")

    # --- sink's host ---

    def reserve(self, key: HandoffKey, prompt_tokens: int) -> RequestKV:
        """Slots for all of it."""
        prompt = np.arange(prompt_tokens, dtype=np.int32)
        self.granted_at = self.clock.now()
        self.kv = self._open(key, prompt, _NO_KEY, inbound=True)
        return self.kv

    def first_token(self, key: HandoffKey, token: OutputToken) -> None:
        """Nobody waits for it."""

    def adopted(self, key: HandoffKey, usage: AttemptUsage) -> None:
        """The end of a round."""
        del key, usage
        took_s = self.clock.now() - self.granted_at
        self._release()
        self.end.send(took_s)

    def failed(self, key: HandoffKey, error: KvferryError) -> None:
        """The benchmark is broken."""
        raise RuntimeError(f"{key}: {error}")

    def _open(
        self, key: HandoffKey, prompt: TokenIds, extra_key: ExtraKey, *, inbound: bool
    ) -> RequestKV:
        kv = self.kv_cache.open(str(key), prompt, extra_key, inbound=inbound)
        self.kv_cache.extend(kv, len(prompt))
        return kv

    def _release(self) -> None:
        assert self.kv is not None
        self.kv_cache.release(self.kv, None)
        self.kv = None


def _raw_group(rank: int, store_path: str) -> Any:
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=_WAIT_S)
    options._threads = 1
    return gloo(FileStore(store_path, 2), rank, 2, options)


def _run_worker(rank: int, end: Connection, store_path: str) -> None:
    torch.set_num_threads(1)
    _Worker(rank, end, store_path).run()
