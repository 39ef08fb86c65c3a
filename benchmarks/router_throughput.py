"""What one router process passes on, against bare grpc.aio servers in the same run.

    python -m benchmarks.router_throughput --json

Client process -> router process -> stub worker process that says tokens at full speed, many
streams at once; and the same client against a bare server in one process. The three take turns.

* `router_msgs_s`: messages that clients got; `router_tokens_s`: tokens in them. Under load a
  message carries all that came while the one before was written.
* `echo_msgs_s`: a bare bidirectional echo of messages of the same size: read and written once
  each, as a router reads from its worker and writes to its client.
* `source_msgs_s`: a bare server that only writes them: the most that grpc.aio can send.
* `*_cpu_us_msg`: CPU time of the server process per message; it does not depend on how many other
  processes share the cores, as the rates do.
* `ratio`, `ratio_source`: of the rates, medians over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc.aio

from benchmarks.router_throughput_process import (
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
    from collections.abc import Callable, Coroutine
    from multiprocessing.connection import Connection

_GENERATE = "/kvferry.rpc.v1.Inference/Generate"
_CLOCK = MonotonicClock()
_START_TIMEOUT_S = 120.0
_ANSWER_TOKENS = 512


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


_Stream: TypeAlias = "Callable[[Count], Coroutine[Any, Any, None]]"


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


async def _measure(
    server: Server,
    stream: Callable[[Count], Coroutine[Any, Any, None]],
    streams: int,
    seconds: float,
) -> Rate:
    """Run `streams` of them at once, and count after a quarter of the time."""
    count = Count()
    tasks = [asyncio.create_task(stream(count)) for _ in range(streams)]
    await asyncio.sleep(0.25 * seconds)
    before, cpu_before = Count(count.messages, count.tokens), server.cpu_s()
    begun = _CLOCK.now()
    await asyncio.sleep(seconds)
    span = _CLOCK.now() - begun
    cpu_s = server.cpu_s() - cpu_before
    messages, tokens = count.messages - before.messages, count.tokens - before.tokens
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if not isinstance(outcome, asyncio.CancelledError):
            raise RuntimeError("a stream of the benchmark ended") from outcome
    return Rate(messages / span, tokens / span, 1e6 * cpu_s / max(1, messages))


async def _ask_router(channel: Any, count: Count) -> None:
    generate = channel.unary_stream(
        _GENERATE,
        request_serializer=inference_pb2.GenerateRequest.SerializeToString,
        response_deserializer=inference_pb2.GenerateResponse.FromString,
    )
    request = inference_pb2.GenerateRequest(
        text="Tell me everything.",
        sampling={"max_tokens": _ANSWER_TOKENS, "ignore_eos": True, "temperature": 0.0},
    )
    while True:
        async for message in generate(request):
            count.messages += 1
            count.tokens += len(message.token_ids)


async def _ask_source(channel: Any, payload: bytes, count: Count) -> None:
    source = channel.unary_stream(
        SOURCE, response_deserializer=inference_pb2.GenerateResponse.FromString
    )
    async for message in source(payload):
        count.messages += 1
        count.tokens += len(message.token_ids)


async def _ask_echo(channel: Any, payload: bytes, count: Count) -> None:
    """Keep a few messages on their way, so that neither side waits for the other."""
    call = channel.stream_stream(
        ECHO, response_deserializer=inference_pb2.GenerateResponse.FromString
    )()
    for _ in range(4):
        await call.write(payload)
    while True:
        message = await call.read()
        count.messages += 1
        count.tokens += len(message.token_ids)
        await call.write(payload)


async def _run(
    arguments: argparse.Namespace, echo: Server, router: Server
) -> list[dict[str, Rate]]:
    """Each of the three in turn, `rounds` times."""
    payload = inference_pb2.GenerateResponse(
        request_id="req-0123456789abcdef01234567", text=" some", token_ids=[1000]
    ).SerializeToString()
    rounds = []
    async with (
        grpc.aio.insecure_channel(echo.told) as bare,
        grpc.aio.insecure_channel(router.told) as front,
    ):
        kinds: dict[str, tuple[Server, _Stream]] = {
            "echo": (echo, lambda count: _ask_echo(bare, payload, count)),
            "router": (router, lambda count: _ask_router(front, count)),
            "source": (echo, lambda count: _ask_source(bare, payload, count)),
        }
        for _ in range(arguments.rounds):
            rates = {}
            for name, (server, stream) in kinds.items():
                rates[name] = await _measure(server, stream, arguments.streams, arguments.seconds)
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
        "ratio_source": median(
            lambda rates: rates["router"].messages_s / rates["source"].messages_s
        ),
    }
    return {name: round(value, 3) for name, value in figures.items()}


def main() -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
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
