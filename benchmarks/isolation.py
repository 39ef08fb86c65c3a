"""What a hung or dead worker does to others' handoffs: `python -m benchmarks.isolation --json`.

One source, two sinks, three processes. Handoffs to the first sink are timed there, from the grant
to the commit, while the second one is well, and again while it is stopped or dead in the middle
of a transfer from the same source: from its last sign of life until the source has given it up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import signal
import statistics
import threading
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

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
from mem_cache.factory import assemble_kv_cache
from mem_cache.layout import KvLayout

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from kvferry.errors import KvferryError
    from kvferry.generation import AttemptUsage
    from kvferry.ids import SlotIndices, TokenIds
    from mem_cache.kv_pool import KvPool
    from mem_cache.layout import KvPart
    from mem_cache.request_kv import RequestKV

LAYOUT = KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, dtype=KvDType.FLOAT32, page_size=16)
"""SmolLM2-135M: 46,080 bytes a token."""

CHUNK_BYTES = 2 * 2**20
CHUNKS = 4
"""Of a timed handoff."""
TOKENS = CHUNKS * CHUNK_BYTES // LAYOUT.bytes_per_token
DISTURBING_TOKENS = 8 * TOKENS
BREAKS_AFTER_CHUNKS = 3
HANDOFFS = 100
"""Before the disturbance, and after the source has given the other sink up."""
DISTURBANCES = {"stopped": signal.SIGSTOP, "killed": signal.SIGKILL}

_SOURCE, _TIMED = Incarnation(1), Incarnation(2)
_NO_KEY = ExtraKey("")
_WAIT_S = 300.0


@dataclass(frozen=True, slots=True)
class _Fetch:
    address: str
    tokens: int
    breaks_by: int | None = None
    """The signal that the sink sends itself after some chunks."""


@dataclass(frozen=True, slots=True)
class _Adopted:
    took_s: float


@dataclass(frozen=True, slots=True)
class _Ended:
    sink: Incarnation
    reason: str
    """Empty: the handoff was closed."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="benchmarks.isolation", description=__doc__)
    parser.add_argument("--json", action="store_true", help="JSON lines")
    parser.add_argument("--rounds", type=int, default=3, help="per disturbance")
    options = parser.parse_args()
    for record in measure(options.rounds):
        text = "  ".join(f"{name} {value}" for name, value in record.items())
        print(json.dumps(record) if options.json else text, flush=True)  # noqa: T201


def measure(rounds: int) -> Iterator[dict[str, object]]:
    """One record per disturbance."""
    for name, number in DISTURBANCES.items():
        undisturbed: list[float] = []
        disturbed: list[float] = []
        for turn in range(rounds):
            with _Trio() as trio:
                trio.handoffs(HANDOFFS // 5)  # builds the link, touches the memory
                undisturbed += trio.handoffs(HANDOFFS)
                disturbed += trio.disturb(number, Incarnation(10 + turn))
        yield _record(name, undisturbed, disturbed)


def _record(name: str, undisturbed: list[float], disturbed: list[float]) -> dict[str, object]:
    record: dict[str, object] = {
        "kind": "isolation",
        "other_sink": name,
        "handoff_bytes": TOKENS * LAYOUT.bytes_per_token,
        "chunk_bytes": CHUNK_BYTES,
        "chunk_ms": round(1000 * statistics.median(undisturbed) / CHUNKS, 3),
    }
    for label, seconds in (("undisturbed", undisturbed), ("disturbed", disturbed)):
        cuts = statistics.quantiles(seconds, n=100, method="inclusive")
        record |= {
            f"{label}_handoffs": len(seconds),
            f"{label}_p50_ms": round(1000 * cuts[49], 3),
            f"{label}_p99_ms": round(1000 * cuts[98], 3),
            f"{label}_max_ms": round(1000 * max(seconds), 3),
        }
    return record


class _Trio:
    """The source and the timed sink, and others for as long as they live."""

    def __enter__(self) -> _Trio:
        self._context = multiprocessing.get_context("spawn")
        self._processes: list[Any] = []
        self._source = self._start("source", _SOURCE)
        self._sink = self._start("sink", _TIMED)
        self._address = _receive(self._source, str)
        _receive(self._sink, str)
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._processes:
            process.kill()
            process.join(_WAIT_S)

    def handoffs(self, count: int) -> list[float]:
        """Seconds of that many, one after the other."""
        return [self._handoff() for _ in range(count)]

    def disturb(self, number: int, incarnation: Incarnation) -> list[float]:
        """Seconds of those while another sink is gone, until the source has noticed, and after."""
        other = self._start("other", incarnation)
        _receive(other, str)
        other.send(_Fetch(self._address, DISTURBING_TOKENS, number))
        assert _receive(other, str) == "breaks"
        seconds: list[float] = []
        while not self._source_gave_up(incarnation):
            seconds.append(self._handoff())
        return seconds + self.handoffs(HANDOFFS)

    def _handoff(self) -> float:
        self._sink.send(_Fetch(self._address, TOKENS))
        return _receive(self._sink, _Adopted).took_s

    def _source_gave_up(self, incarnation: Incarnation) -> bool:
        while self._source.poll():
            match _receive(self._source, _Ended):
                case _Ended(sink) if sink == incarnation:
                    # Closed or cancelled: a lost session ends it either way.
                    return True
                case _Ended(reason=reason):
                    assert not reason, f"the source ended a timed handoff: {reason}"
        return False

    def _start(self, name: str, incarnation: Incarnation) -> Connection:
        here, there = self._context.Pipe()
        process = self._context.Process(target=_run_worker, args=(name, incarnation, there))
        process.start()
        there.close()
        self._processes.append(process)
        return here


def _receive(end: Connection, kind: type) -> Any:
    if not end.poll(_WAIT_S):
        raise TimeoutError("a worker does not answer")
    message = end.recv()
    assert isinstance(message, kind), message
    return message


# --- in the workers ---------------------------------------------------------------------------


class _BreakingScatter:
    """A pool's scatter whose process can be told to break in the middle of a transfer: with some
    chunks here and others on their way."""

    def __init__(self, pool: KvPool, end: Connection) -> None:
        self._scatter = pool.scatter
        self._end = end
        self._number: int | None = None
        self._chunks = 0

    def break_by(self, number: int) -> None:
        """Send this process the signal after some more chunks."""
        self._number = number

    def __call__(self, slots: SlotIndices, part: KvPart, payload: torch.Tensor) -> None:
        """On the link's thread."""
        self._scatter(slots, part, payload)
        self._chunks += 1
        if self._number is not None and self._chunks == BREAKS_AFTER_CHUNKS:
            self._end.send("breaks")
            os.kill(os.getpid(), self._number)


class _Worker:
    """A handoff driver, and hosts that compute nothing."""

    def __init__(self, name: str, incarnation: Incarnation, end: Connection) -> None:
        self.incarnation = incarnation
        self.end = end
        self.inbox: SimpleQueue[object] = SimpleQueue()
        num_slots = 2 * (DISTURBING_TOKENS + TOKENS)
        num_slots -= num_slots % LAYOUT.page_size
        cache_config = CacheConfig(page_size=LAYOUT.page_size, rows=8)
        self.kv_cache = assemble_kv_cache(LAYOUT, cache_config, num_slots, 2048)
        # Every page of the pool is touched, so that no handoff pays for the first use of memory.
        self.kv_cache.pool.buffer.fill_(1.0)
        self.scatter = _BreakingScatter(self.kv_cache.pool, end)
        self.kv_cache.pool.scatter = self.scatter
        self.kvs: dict[HandoffKey, RequestKV] = {}
        self.clock = MonotonicClock()
        self.count = 0
        self.granted_at = 0.0
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.driver = HandoffDriver(
            worker_id=WorkerId(name),
            incarnation=incarnation,
            kv_cache=self.kv_cache,
            config=HandoffConfig(staging_buffer_bytes=CHUNK_BYTES),
            clock=self.clock,
            post=self.inbox.put,
            loop=self.loop,
            source_host=self,
            sink_host=self,
        )

    def run(self) -> None:
        """The engine thread; the process is killed in the end."""
        self.end.send(asyncio.run_coroutine_threadsafe(self._serve(), self.loop).result(_WAIT_S))
        threading.Thread(target=self._read_commands, daemon=True).start()
        while True:
            event = self.inbox.get()
            match event:
                case _Fetch():
                    self._fetch(event)
                case _:
                    self.driver.handle(event)

    async def _serve(self) -> str:
        self.server = grpc.aio.server(options=SESSION_SERVER_OPTIONS)
        rpc.add_HandoffServicer_to_server(self.driver.servicer(), self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        return f"127.0.0.1:{port}"

    def _read_commands(self) -> None:
        while True:
            try:
                self.inbox.put(self.end.recv())
            except EOFError:
                os._exit(0)

    def _fetch(self, command: _Fetch) -> None:
        self.count += 1
        if command.breaks_by is not None:
            self.scatter.break_by(command.breaks_by)
        key = HandoffKey(RequestId(f"r{self.count}"), Attempt(1), _SOURCE, self.incarnation)
        source = PrefillSource(WorkerId("source"), command.address, _SOURCE)
        prompt = np.arange(command.tokens, dtype=np.int32)
        self.driver.fetch(key, source, prompt, SamplingParams(), CacheUse(_NO_KEY))

    # --- source's host ---

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
        kv = self._open(key, len(prompt), inbound=False)
        self.kv_cache.commit(kv, len(prompt))
        self.driver.scheduled(key, kv, 0)
        self.driver.computed(key, len(prompt))
        self.driver.finished(key, (OutputToken(1),))

    def start_held(self, key: HandoffKey, prompt: TokenIds, cache_use: CacheUse) -> None:
        """Nobody asks for it."""
        raise AssertionError(f"{key} {prompt} {cache_use}")

    def closed(self, key: HandoffKey) -> None:
        """Nothing is published, so that the next prompt hits nothing."""
        self._release(key)
        self.end.send(_Ended(key.sink_incarnation, ""))

    def cancel(self, key: HandoffKey, reason: str) -> None:
        """The sink that broke; a timed handoff never."""
        self._release(key)
        self.end.send(_Ended(key.sink_incarnation, reason))

    # --- sink's host ---

    def reserve(self, key: HandoffKey, prompt_tokens: int) -> RequestKV:
        """Slots for all of it."""
        self.granted_at = self.clock.now()
        return self._open(key, prompt_tokens, inbound=True)

    def first_tokens(self, key: HandoffKey, tokens: tuple[OutputToken, ...]) -> None:
        """Nobody waits for them."""

    def adopted(self, key: HandoffKey, usage: AttemptUsage) -> None:
        """The end of a handoff."""
        del usage
        took_s = self.clock.now() - self.granted_at
        self._release(key)
        self.end.send(_Adopted(took_s))

    def failed(self, key: HandoffKey, error: KvferryError) -> None:
        """The benchmark is broken."""
        raise RuntimeError(f"{key}: {error}")

    def _open(self, key: HandoffKey, tokens: int, *, inbound: bool) -> RequestKV:
        prompt = np.arange(tokens, dtype=np.int32)
        kv = self.kv_cache.open(str(key), prompt, _NO_KEY, inbound=inbound)
        self.kv_cache.extend(kv, tokens)
        self.kvs[key] = kv
        return kv

    def _release(self, key: HandoffKey) -> None:
        self.kv_cache.release(self.kvs.pop(key), None)


def _run_worker(name: str, incarnation: Incarnation, end: Connection) -> None:
    torch.set_num_threads(1)
    _Worker(name, incarnation, end).run()


if __name__ == "__main__":
    main()
