"""One of the two processes of the transfer benchmark: handoff drivers, a raw Gloo group, an echo.

Process 0 is the source, process 1 the sink. Hosts compute nothing: a prompt counts as computed as
soon as it is scheduled.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from datetime import timedelta
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
from kvferry.config import CacheConfig, HandoffConfig, KvDType, TransportChoice
from kvferry.generation import OutputToken, PrefillSource
from kvferry.ids import Attempt, ExtraKey, Incarnation, RequestId, WorkerId
from kvferry.rpc.v1 import handoff_pb2_grpc as rpc
from kvferry.sampling import SamplingParams
from mem_cache.factory import assemble_kv_cache
from mem_cache.layout import KvLayout

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from kvferry.errors import KvferryError
    from kvferry.generation import AttemptUsage
    from kvferry.ids import SlotIndices, TokenIds
    from mem_cache.layout import KvPart
    from mem_cache.request_kv import RequestKV

LAYOUT = KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, dtype=KvDType.FLOAT32, page_size=16)
"""SmolLM2-135M: 46,080 bytes a token."""

TRANSPORTS = {"shared_memory": TransportChoice.AUTO, "gloo": TransportChoice.GLOO}
TOKENS_MAX = 1600
WAIT_S = 60.0

_SOURCE, _SINK = Incarnation(1), Incarnation(2)
_NO_KEY = ExtraKey("")
_ECHO = "/kvferry.benchmark/Echo"
_CACHED = np.arange(100_000, 100_000 + 4 * LAYOUT.page_size, dtype=np.int32)
"""A prompt that both workers hold from the start."""


@dataclass(frozen=True, slots=True)
class Command:
    """What the benchmark asks of a process; each answers once per command, but for stop."""

    what: str
    """raw, handoff, hit, echo or stop."""
    tokens: int = 0
    transport: str = ""
    addresses: tuple[tuple[str, str], ...] = ()
    """(transport, address) of the source's servers."""


class Process:
    """A driver per transport over one cache, and the two things to compare them with."""

    def __init__(self, rank: int, end: Connection, store_path: str) -> None:
        self.rank = rank
        self.end = end
        self.inbox: SimpleQueue[tuple[str, object]] = SimpleQueue()
        self.clock = MonotonicClock()
        self.kv_cache = assemble_kv_cache(
            LAYOUT, CacheConfig(page_size=LAYOUT.page_size, rows=8), 2 * TOKENS_MAX, 2048
        )
        # Every page of the pool is touched, so that no round pays for the first use of memory.
        self.kv_cache.pool.buffer.fill_(float(rank))
        self._note_first_gather()
        self._hold(_CACHED)
        self.raw_buffer = torch.zeros(TOKENS_MAX * LAYOUT.bytes_per_token, dtype=torch.uint8)
        self.raw_offset = 0
        self.raw_group = _raw_group(rank, store_path)
        self.kv: RequestKV | None = None
        self.count = 0
        self.began_at = self.granted_at = 0.0
        self.gathered_at: float | None = None
        self.loop = asyncio.new_event_loop()
        self.loop_thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.loop_thread.start()
        self.drivers = {name: self._new_driver(name) for name in TRANSPORTS}
        self.servers: list[grpc.aio.Server] = []
        self.channel: grpc.aio.Channel | None = None
        self.prompt = _CACHED

    def _new_driver(self, transport: str) -> HandoffDriver:
        return HandoffDriver(
            worker_id=WorkerId(f"worker-{self.rank}"),
            incarnation=(_SOURCE, _SINK)[self.rank],
            kv_cache=self.kv_cache,
            config=HandoffConfig(transport=TRANSPORTS[transport]),
            clock=self.clock,
            post=lambda event: self.inbox.put((transport, event)),
            loop=self.loop,
            source_host=_SourceHost(self, transport),
            sink_host=_SinkHost(self),
        )

    def _note_first_gather(self) -> None:
        pool = self.kv_cache.pool
        gather = pool.gather

        def noted(slots: SlotIndices, part: KvPart, out: torch.Tensor) -> int:
            if self.gathered_at is None:
                self.gathered_at = self.clock.now()
            return gather(slots, part, out)

        pool.gather = noted  # type: ignore[method-assign]

    def _hold(self, prompt: TokenIds) -> None:
        """Publish a prompt, as a request that was served before has."""
        kv = self.kv_cache.open("before", prompt, _NO_KEY)
        self.kv_cache.extend(kv, len(prompt))
        self.kv_cache.commit(kv, len(prompt))
        self.kv_cache.release(kv, prompt)

    # --- the engine thread ---

    def run(self) -> None:
        """Commands of the benchmark and events of the drivers."""
        serving = asyncio.run_coroutine_threadsafe(self._serve(), self.loop)
        self.end.send(serving.result(WAIT_S))
        threading.Thread(target=self._read_commands, daemon=True).start()
        while True:
            transport, event = self.inbox.get()
            match event:
                case Command("stop"):
                    self._stop()
                    return
                case Command("raw", tokens):
                    self.end.send(self._raw(tokens * LAYOUT.bytes_per_token))
                case Command("echo"):
                    self._echo(event)
                case Command("handoff" | "hit"):
                    self._begin(event)
                case _:
                    self.drivers[transport].handle(event)

    async def _serve(self) -> tuple[tuple[str, str], ...]:
        """Start a gRPC server per driver; their addresses."""
        addresses = []
        for transport, driver in self.drivers.items():
            server = grpc.aio.server(options=SESSION_SERVER_OPTIONS)
            rpc.add_HandoffServicer_to_server(driver.servicer(), server)
            server.add_generic_rpc_handlers((_EchoHandler(),))
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            self.servers.append(server)
            addresses.append((transport, f"127.0.0.1:{port}"))
        return tuple(addresses)

    def _read_commands(self) -> None:
        command = Command("")
        while command.what != "stop":
            command = self.end.recv()
            self.inbox.put(("", command))

    def _stop(self) -> None:
        for driver in self.drivers.values():
            driver.close()
        asyncio.run_coroutine_threadsafe(self._stop_serving(), self.loop).result(WAIT_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.loop_thread.join(WAIT_S)
        del self.raw_group

    async def _stop_serving(self) -> None:
        for driver in self.drivers.values():
            await driver.wait_closed()
        if self.channel is not None:
            await self.channel.close()
        for server in self.servers:
            await server.stop(None)

    def _raw(self, payload_bytes: int) -> float:
        """One Gloo message; at the sink, seconds from its word to start to the last byte."""
        # Always other bytes, as a handoff's slots are: what was sent last would be in cache.
        room = len(self.raw_buffer) - payload_bytes + 1
        self.raw_offset = (self.raw_offset + payload_bytes) % room
        payload = self.raw_buffer[self.raw_offset :][:payload_bytes]
        word = torch.zeros(1, dtype=torch.uint8)
        started = self.clock.now()
        if self.rank == 0:
            self.raw_group.recv([word], 1, 1).wait()
            self.raw_group.send([payload], 1, 2).wait()
        else:
            arrival = self.raw_group.recv([payload], 0, 2)
            self.raw_group.send([word], 0, 1).wait()
            arrival.wait()
        return self.clock.now() - started

    def _echo(self, command: Command) -> None:
        """At the sink, seconds of a unary call to the source, made and answered on the loops."""
        if self.rank == 0:
            self.end.send(0.0)
            return
        address = dict(command.addresses)["gloo"]
        calling = asyncio.run_coroutine_threadsafe(self._call(address), self.loop)
        self.end.send(calling.result(WAIT_S))

    async def _call(self, address: str) -> float:
        if self.channel is None:
            self.channel = grpc.aio.insecure_channel(address)
            await self.channel.unary_unary(_ECHO)(b"first")
        call = self.channel.unary_unary(_ECHO)
        started = self.clock.now()
        await call(b"request")
        return self.clock.now() - started

    def _begin(self, command: Command) -> None:
        """A handoff, at the sink. The source's answer is when it has closed."""
        self.gathered_at = None
        if self.rank == 0:
            return
        self.count += 1
        key = HandoffKey(RequestId(f"r{self.count}"), Attempt(1), _SOURCE, _SINK)
        address = dict(command.addresses)[command.transport]
        source = PrefillSource(WorkerId("worker-0"), address, _SOURCE)
        is_hit = command.what == "hit"
        self.prompt = _CACHED if is_hit else np.arange(command.tokens, dtype=np.int32)
        self.began_at = self.clock.now()
        driver = self.drivers[command.transport]
        driver.fetch(key, source, self.prompt, SamplingParams(), CacheUse(_NO_KEY))

    def open(self, key: HandoffKey, prompt: TokenIds, *, inbound: bool) -> RequestKV:
        """Slots for all of a prompt."""
        kv = self.kv = self.kv_cache.open(str(key), prompt, _NO_KEY, inbound=inbound)
        self.kv_cache.extend(kv, len(prompt))
        return kv

    def release(self) -> None:
        """Nothing is published, so that the next prompt hits nothing."""
        assert self.kv is not None
        self.kv_cache.release(self.kv, None)
        self.kv = None


class _SourceHost:
    """Implements `SourceHost`."""

    def __init__(self, process: Process, transport: str) -> None:
        self._process = process
        self._transport = transport

    def start(
        self,
        key: HandoffKey,
        prompt: TokenIds,
        sampling: SamplingParams,
        cache_use: CacheUse,
        goes_first: bool,
    ) -> None:
        """All of the prompt counts as computed at once."""
        del sampling, cache_use, goes_first
        process, driver = self._process, self._process.drivers[self._transport]
        kv = process.open(key, prompt, inbound=False)
        process.kv_cache.commit(kv, len(prompt))
        driver.scheduled(key, kv, 0)
        driver.computed(key, len(prompt))
        driver.finished(key, (OutputToken(1),))

    def closed(self, key: HandoffKey) -> None:
        """Answer with when the first byte was gathered; None if none was."""
        del key
        self._process.release()
        self._process.end.send(self._process.gathered_at)

    def start_held(self, key: HandoffKey, prompt: TokenIds, cache_use: CacheUse) -> None:
        """Nothing is given back here."""
        raise RuntimeError(f"{key} wants {len(prompt)} tokens back, {cache_use}")

    def cancel(self, key: HandoffKey, reason: str) -> None:
        """The benchmark is broken."""
        raise RuntimeError(f"{key}: {reason}")


class _SinkHost:
    """Implements `SinkHost`."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def reserve(self, key: HandoffKey, prompt_tokens: int) -> RequestKV:
        """Slots for all of it."""
        process = self._process
        assert prompt_tokens == len(process.prompt)
        process.granted_at = process.clock.now()
        return process.open(key, process.prompt, inbound=True)

    def first_tokens(self, key: HandoffKey, tokens: tuple[OutputToken, ...]) -> None:
        """Nobody waits for them."""

    def adopted(self, key: HandoffKey, usage: AttemptUsage) -> None:
        """Answer with when it began, when it was granted, and when it was committed."""
        del key, usage
        process = self._process
        adopted_at = process.clock.now()
        process.release()
        process.end.send((process.began_at, process.granted_at, adopted_at))

    def failed(self, key: HandoffKey, error: KvferryError) -> None:
        """The benchmark is broken."""
        raise RuntimeError(f"{key}: {error}")


class _EchoHandler(grpc.GenericRpcHandler):
    """Answers `_ECHO` with the request."""

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        """See `grpc.GenericRpcHandler.service`."""
        if handler_call_details.method != _ECHO:
            return None
        return grpc.unary_unary_rpc_method_handler(_echo)


async def _echo(request: bytes, context: object) -> bytes:
    del context
    return request


def _raw_group(rank: int, store_path: str) -> Any:
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=WAIT_S)
    options._threads = 1
    return gloo(FileStore(store_path, 2), rank, 2, options)


def run_process(rank: int, end: Connection, store_path: str) -> None:
    """What a process of the benchmark does."""
    torch.set_num_threads(1)
    Process(rank, end, store_path).run()
