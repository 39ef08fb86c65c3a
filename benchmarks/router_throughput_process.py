"""The servers of the router's throughput benchmark, each in a process of its own.

* A bare grpc.aio server: `Echo` writes back each message it reads, `Source` writes its request
  back `ANSWER_TOKENS` times. Neither parses anything.
* A stub worker: the product's `Worker` service over an engine that computes nothing. Each turn
  gives every running attempt its next token, as fast as the router takes them.
* A router: the product's, with its front door and its metrics.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from cluster.worker_service import WorkerService
from decode_worker.attempt_exchange import AttemptExchange
from decode_worker.intake import CancelAttempt, EndSample, StartAttempt
from engine.kv_event_feed import Subscribe, Unsubscribe
from engine.step_loop import EngineSnapshot
from kvferry.accounts import KvAccounts, WorkerLoad
from kvferry.clock import MonotonicClock
from kvferry.config import ClusterConfig, ModelConfig, SchedulerConfig
from kvferry.generation import (
    AttemptFinish,
    AttemptOutput,
    AttemptUsage,
    FinishReason,
    OutputToken,
)
from kvferry.ids import WorkerId, new_incarnation
from kvferry.kv_events import KvEventBatch
from kvferry.membership import Membership, Role, WorkerInfo
from kvferry.rpc.v1 import worker_pb2_grpc
from router.api.door_settings import DoorSettings
from router.api.grpc_server import serve
from router.api.request_metrics import RequestMetrics
from router.router import Router

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

    from decode_worker.attempt_stream import AttemptStream

ECHO, SOURCE = "/kvferry.benchmark/Echo", "/kvferry.benchmark/Source"

ANSWER_TOKENS = 512
"""Of each answer, and messages of each stream of the bare server."""

_TOKENS = tuple(range(1000, 1512))
"""Said in turn: ordinary words of the vocabulary, at least one byte each."""

_BACKLOG_TURNS = 8
"""Turns that may wait for the router before the stub engine pauses."""

_PAUSE_S = 0.0005


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """What a router process is to serve."""

    model_directory: Path
    worker: WorkerInfo
    streams: int


def run_echo(pipe: Connection) -> None:
    """Serve until the pipe closes."""

    async def echo(messages: Any, _context: Any) -> Any:
        async for message in messages:
            yield message

    async def source(data: bytes, context: Any) -> None:
        for _ in range(ANSWER_TOKENS):
            await context.write(data)

    async def start() -> str:
        server = grpc.aio.server()
        handlers = {
            "Echo": grpc.stream_stream_rpc_method_handler(echo),
            "Source": grpc.unary_stream_rpc_method_handler(source),
        }
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("kvferry.benchmark", handlers),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        _KEPT.append(server)
        return f"127.0.0.1:{port}"

    _serve(pipe, start())


def run_worker(pipe: Connection, streams: int) -> None:
    """Serve until the pipe closes."""

    async def start() -> WorkerInfo:
        server = grpc.aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        info = WorkerInfo(WorkerId("stub"), Role.BOTH, new_incarnation(), f"127.0.0.1:{port}")
        engine = StubEngine(info, streams)
        servicer = _StubService(info, engine)
        worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server)
        await server.start()
        _KEPT.extend((server, asyncio.create_task(engine.run())))
        return info

    _serve(pipe, start())


def run_router(pipe: Connection, plan: ServerPlan) -> None:
    """Serve until the pipe closes."""

    async def start() -> str:
        config = ClusterConfig(
            model=ModelConfig(served_name="stub"),
            scheduler=SchedulerConfig(running_max=plan.streams),
        )
        config = replace(config, router=replace(config.router, requests_max=4 * plan.streams))
        router = Router(config, plan.model_directory, MonotonicClock(), random.Random(1))
        await router.start()
        doors = DoorSettings(router, RequestMetrics(router, MonotonicClock()))
        front_door, port = await serve(doors, ("127.0.0.1", 0))
        await router.set_membership(Membership(1, (plan.worker,)))
        _KEPT.append(front_door)
        return f"127.0.0.1:{port}"

    _serve(pipe, start())


_KEPT: list[Any] = []
"""What must live as long as the process."""


def _serve(pipe: Connection, start: Any) -> None:
    """Tell where; then answer each message with the CPU seconds used so far."""

    async def main() -> None:
        pipe.send(await start)
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def on_message() -> None:
            try:
                pipe.recv()
                pipe.send(time.process_time())
            except EOFError:
                ended.set()

        loop.add_reader(pipe.fileno(), on_message)
        await ended.wait()

    asyncio.run(main())
    # Calls in flight are of no interest to anybody.
    os._exit(0)


class StubEngine:
    """What `WorkerService` asks of a step loop, on the event loop itself."""

    def __init__(self, info: WorkerInfo, streams: int) -> None:
        self.exchanges: list[AttemptExchange] = []
        self._info = info
        self._running: dict[AttemptStream, list[int]] = {}
        """Tokens said and to be said."""
        self._has_work = asyncio.Event()
        slots = 2**24
        accounts = KvAccounts(slots, 0, 0, 0, 0, slots, 0, 0, 4 * streams)
        load = WorkerLoad(prefill_tokens_per_s=1e6)
        self.snapshot = EngineSnapshot(load, accounts)

    def is_alive(self) -> bool:
        """Always."""
        return True

    def now(self) -> float:
        """Of no interest here."""
        return 0.0

    def post(self, event: Any) -> None:
        """Take it at once."""
        match event:
            case StartAttempt(attempt, stream, _):
                self._running[stream] = [0, attempt.sampling.max_tokens]
                self._has_work.set()
            case CancelAttempt(_, stream):
                self._running.pop(stream, None)
            case Subscribe(subscriber):
                subscriber.deliver(
                    KvEventBatch(self._info.worker_id, self._info.incarnation, 0, True, ())
                )
            case EndSample() | Unsubscribe():
                pass

    async def run(self) -> None:
        """Turns without end."""
        while True:
            if not self._running:
                self._has_work.clear()
                await self._has_work.wait()
            self._turn()
            await asyncio.sleep(0)
            while self._is_ahead():  # noqa: ASYNC110 - of what is measured, nothing may be changed
                await asyncio.sleep(_PAUSE_S)

    def _is_ahead(self) -> bool:
        limit = _BACKLOG_TURNS * max(1, len(self._running))
        return any(exchange.backlog > limit for exchange in self.exchanges)

    def _turn(self) -> None:
        for stream, counts in list(self._running.items()):
            token = OutputToken(_TOKENS[counts[0] % len(_TOKENS)])
            counts[0] += 1
            stream.deliver(AttemptOutput((token,)))
            if counts[0] == counts[1]:
                del self._running[stream]
                finish = AttemptFinish(FinishReason.LENGTH, AttemptUsage())
                stream.deliver(AttemptOutput((), finish))


class _StubService(WorkerService):
    """Lets the engine see how much waits for each router."""

    def __init__(self, info: WorkerInfo, engine: StubEngine) -> None:
        super().__init__(info, engine)  # type: ignore[arg-type]
        self._stub_info, self._stub = info, engine

    async def Attempts(self, request_iterator: Any, context: Any) -> None:
        """As the product's."""
        exchange = AttemptExchange(self._stub_info, self._stub)  # type: ignore[arg-type]
        self._stub.exchanges.append(exchange)
        try:
            await exchange.run(context)
        finally:
            self._stub.exchanges.remove(exchange)
