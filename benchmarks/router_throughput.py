"""What one router process passes on, against bare grpc.aio servers in the same run.

    python -m benchmarks.router_throughput --json

Client process -> router process -> stub worker process that says tokens at full speed, one per turn
to each of many streams; and the same client against a bare server in one process. They take turns,
each until its clients have got `--messages`. The same for all: streams at once, connections they
share, fields of a message, and how streams end and begin anew: after as many messages as an answer
has tokens, or, at the router, with the answer.

* `echo_msgs_s`: a bare bidirectional echo of messages of one token, read and written once each.
* `source_msgs_s`: a bare server that only writes them: the most that grpc.aio can send.
* `router_msgs_s`: messages that clients got; `router_tokens_s`: tokens in them, each of which the
  worker said alone. Under load a message carries all that came while the last one was written.
* `*_cpu_us_msg`: CPU time of the server process per message that clients got. It depends less than
  the rates on who else uses the cores; the router has the worker beside it, the echo has nobody.
* `ratio`: messages a second that clients got from the router, by those from the echo. A message of
  the router counts once, however many tokens it carries.
* `ratio_tokens`: the same in tokens: what is passed on of what is said.
* `ratio_cpu`: the echo's CPU time per message by the router's.

All ratios are medians over the rounds. Clients on one connection favour the echo: what it reads on
a connection lets gRPC put several of its writes into one system call.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import statistics
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc.aio

from benchmarks.router_throughput_process import (
    ANSWER_TOKENS,
    ECHO,
    SOURCE,
    ServerPlan,
    run_echo,
    run_router,
    run_worker,
)
from engine.model_directory import resolve_model
from kvferry.clock import MonotonicClock
from kvferry.config import ModelConfig
from kvferry.rpc.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from multiprocessing.connection import Connection

_GENERATE = "/kvferry.rpc.v1.Inference/Generate"
_CLOCK = MonotonicClock()
_START_TIMEOUT_S = 120.0
_MEASURE_TIMEOUT_S = 300.0
_LOOK_INTERVAL_S = 0.01
_WARM_UP_PART = 0.25
_UNDERWAY = 4
"""Messages of an echo's client that are on their way, so that neither side waits for the other."""

_CHANNEL_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)
"""A connection for each channel."""


@dataclass(slots=True)
class Count:
    """What clients got."""

    messages: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Rate:
    """Of one measurement, per second."""

    messages_s: float
    tokens_s: float
    cpu_us_message: float


_Client: TypeAlias = "Callable[[Count], Coroutine[Any, Any, None]]"
"""Reads one stream after the other, for ever."""


class Server:
    """A process, and what it told of itself at its start."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe: Connection
        self._pipe, far = context.Pipe()
        self._process = context.Process(target=target, args=(far, *arguments), daemon=True)
        self._process.start()
        far.close()
        assert self._pipe.poll(_START_TIMEOUT_S), f"{target.__name__} does not start"
        self.told: Any = self._pipe.recv()

    def cpu_s(self) -> float:
        """CPU time it has used."""
        self._pipe.send(None)
        assert self._pipe.poll(_START_TIMEOUT_S), "a server does not answer"
        return float(self._pipe.recv())

    def stop(self) -> None:
        """End it."""
        self._pipe.close()
        self._process.join(10.0)
        if self._process.is_alive():
            self._process.kill()


async def _measure(server: Server, clients: Sequence[_Client], messages: int) -> Rate:
    """Run all at once until they have got so many more messages than when they were warm."""
    count = Count()
    tasks = [asyncio.create_task(client(count)) for client in clients]
    async with asyncio.timeout(_MEASURE_TIMEOUT_S):
        await _until(count, int(_WARM_UP_PART * messages), tasks)
        before, cpu_before = Count(count.messages, count.tokens), server.cpu_s()
        begun = _CLOCK.now()
        await _until(count, before.messages + messages, tasks)
    span = _CLOCK.now() - begun
    got, tokens = count.messages - before.messages, count.tokens - before.tokens
    cpu_s = server.cpu_s() - cpu_before
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return Rate(got / span, tokens / span, 1e6 * cpu_s / got)


async def _until(count: Count, messages: int, tasks: Sequence[asyncio.Task[None]]) -> None:
    while count.messages < messages:
        await asyncio.sleep(_LOOK_INTERVAL_S)
        for task in tasks:
            if task.done():
                raise RuntimeError("a client of the benchmark ended") from task.exception()


async def _ask_router(channel: Any, count: Count) -> None:
    generate = channel.unary_stream(
        _GENERATE,
        request_serializer=inference_pb2.GenerateRequest.SerializeToString,
        response_deserializer=inference_pb2.GenerateResponse.FromString,
    )
    request = inference_pb2.GenerateRequest(
        text="Tell me everything.",
        sampling={"max_tokens": ANSWER_TOKENS, "ignore_eos": True, "temperature": 0.0},
    )
    while True:
        async for message in generate(request):
            count.messages += 1
            count.tokens += len(message.token_ids)


async def _ask_source(channel: Any, payload: bytes, count: Count) -> None:
    source = channel.unary_stream(
        SOURCE, response_deserializer=inference_pb2.GenerateResponse.FromString
    )
    while True:
        async for message in source(payload):
            count.messages += 1
            count.tokens += len(message.token_ids)


async def _ask_echo(channel: Any, payload: bytes, count: Count) -> None:
    echo = channel.stream_stream(
        ECHO, response_deserializer=inference_pb2.GenerateResponse.FromString
    )
    while True:
        call = echo()
        for _ in range(_UNDERWAY):
            await call.write(payload)
        for number in range(ANSWER_TOKENS):
            message = await call.read()
            count.messages += 1
            count.tokens += len(message.token_ids)
            if number < ANSWER_TOKENS - _UNDERWAY:
                await call.write(payload)
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


async def _run(
    arguments: argparse.Namespace, echo: Server, router: Server
) -> list[dict[str, Rate]]:
    """Each of the three in turn, `rounds` times."""
    payload = inference_pb2.GenerateResponse(
        request_id="req-0123456789abcdef01234567", text=" some", token_ids=[1000]
    ).SerializeToString()
    rounds = []
    async with contextlib.AsyncExitStack() as stack:

        async def channels_to(server: Server) -> list[Any]:
            """One per stream; several streams may share one."""
            new = [
                await stack.enter_async_context(
                    grpc.aio.insecure_channel(server.told, options=_CHANNEL_OPTIONS)
                )
                for _ in range(arguments.connections)
            ]
            return [new[number % len(new)] for number in range(arguments.streams)]

        bare, front = await channels_to(echo), await channels_to(router)
        kinds: dict[str, tuple[Server, list[_Client]]] = {
            "echo": (echo, [partial(_ask_echo, channel, payload) for channel in bare]),
            "router": (router, [partial(_ask_router, channel) for channel in front]),
            "source": (echo, [partial(_ask_source, channel, payload) for channel in bare]),
        }
        for _ in range(arguments.rounds):
            rates = {}
            for name, (server, clients) in kinds.items():
                rates[name] = await _measure(server, clients, arguments.messages)
            rounds.append(rates)
    return rounds


def _figures(rounds: list[dict[str, Rate]]) -> dict[str, float]:
    def median(value: Callable[[dict[str, Rate]], float]) -> float:
        return statistics.median(map(value, rounds))

    figures = {
        "echo_msgs_s": median(lambda rates: rates["echo"].messages_s),
        "source_msgs_s": median(lambda rates: rates["source"].messages_s),
        "router_msgs_s": median(lambda rates: rates["router"].messages_s),
        "router_tokens_s": median(lambda rates: rates["router"].tokens_s),
        "echo_cpu_us_msg": median(lambda rates: rates["echo"].cpu_us_message),
        "source_cpu_us_msg": median(lambda rates: rates["source"].cpu_us_message),
        "router_cpu_us_msg": median(lambda rates: rates["router"].cpu_us_message),
        "ratio": median(lambda rates: rates["router"].messages_s / rates["echo"].messages_s),
        "ratio_tokens": median(lambda rates: rates["router"].tokens_s / rates["echo"].tokens_s),
        "ratio_cpu": median(
            lambda rates: rates["echo"].cpu_us_message / rates["router"].cpu_us_message
        ),
    }
    return {name: round(value, 3) for name, value in figures.items()}


def main() -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--connections", type=int, default=1, help="that the streams share")
    parser.add_argument("--messages", type=int, default=20_000, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    servers: list[Server] = []
    try:
        servers.append(echo := Server(run_echo))
        servers.append(worker := Server(run_worker, arguments.streams))
        plan = ServerPlan(resolve_model(ModelConfig().path), worker.told, arguments.streams)
        servers.append(router := Server(run_router, plan))
        figures = _figures(asyncio.run(_run(arguments, echo, router)))
    finally:
        for server in servers:
            server.stop()
    if arguments.json:
        print(json.dumps(figures))  # noqa: T201
    else:
        for name, value in figures.items():
            print(f"{name:20} {value:12.3f}")  # noqa: T201


if __name__ == "__main__":
    main()
