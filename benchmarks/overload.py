"""Overload and fairness at the router: what clients see when they ask for more than there is.

    python -m benchmarks.overload --json [--seconds 20] [--times 3] [--limit 2.0] [--prompt 400]
                                         [--answer 20] [--prefill 2] [--decode 2]
                                         [--modest 0.1] [--others 3] [--rounds 3]

A whole cluster in this process: real router, gRPC, handoffs and schedulers. The model is the digest
model of the tests, exact and almost free, which is made to take `--token-ms` per prompt token and
`--step-ms` per decode step by sleeping; so the figures do not depend on what else the machine
computes, as long as it has some time left for the rest.

* capacity: a closed loop of as many clients as the cluster has places, of a class that has no
  limit; its answers per second are the capacity.
* overload: requests come at random at `--times` that rate. Those answered within `--limit` (the
  class's `ttft_limit_s`) are the goodput.
* modest, flooded: `--others` + 1 tenants ask for `--modest` of the capacity each; then another one
  asks for `--times` the capacity beside them. TTFT is that of all of them. In both phases of a
  round they ask for the same at the same moments: a p95 of a hundred requests hangs on which of
  them come together, and drawn anew its ratio is above 1.2 in one run of four with nothing amiss.

`--rounds` of all phases, in turn, so that what is compared has met the same machine; `--seconds` is
how long each kind of phase lasts in all rounds together, and the four kinds are a run.

One JSON object a phase, and in the end {"goodput_over_capacity", "accepted_ttft_p95_s",
"late_refusals", "modest_p95_ratio"} of all rounds together, and "refused_p95_ms". Late is who was
refused more than `--late-ms` after it came, of all that were refused.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import grpc.aio

from benchmarks.token_gaps import percentile
from kvferry.clock import MonotonicClock
from kvferry.config import SchedulerConfig
from kvferry.membership import Role
from kvferry.router_config import RouterConfig, ServiceClassConfig, ServiceClassesConfig
from kvferry.rpc.v1 import inference_pb2, inference_pb2_grpc
from tests.support import digest_cluster as digest
from tests.support.digest_model import VOCAB, DigestRunner

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from engine.forward_batch import ForwardBatch
    from kvferry.config import ClusterConfig
    from mem_cache.kv_pool import KvPool

_RUNNING_MAX = 8
_SLOTS = 8192
_PAGE = 16
_CLOCK = MonotonicClock()


@dataclass(slots=True, eq=False)
class Outcome:
    """One request, in seconds from when it was sent."""

    tenant: str
    ttft_s: float | None = None
    done_s: float | None = None
    refused_s: float | None = None
    retry_after_ms: int | None = None


def _paced_runner(token_s: float, step_s: float) -> type[DigestRunner]:
    """The digest model, made as a worker makes its model, that takes its time."""

    class PacedRunner(DigestRunner):
        def __init__(self, directory: Path, kv_pool: KvPool, **how: object) -> None:
            super().__init__(kv_pool, kv_pool.layout.page_size)

        def warm_up(self) -> None:
            """Nothing to load."""

        def close(self) -> None:
            """No other ranks."""

        def forward(
            self, batch: ForwardBatch, on_layers: Callable[[int], None] | None = None
        ) -> torch.Tensor:
            lengths = batch.attention.query_lengths.tolist()
            decoded = step_s if 1 in lengths else 0.0
            time.sleep(decoded + token_s * sum(length for length in lengths if length > 1))
            return super().forward(batch, on_layers)

    return PacedRunner


class Load:
    """Clients of one router."""

    def __init__(self, channel: Any, arguments: argparse.Namespace) -> None:
        self._stub = inference_pb2_grpc.InferenceStub(channel)
        self._arguments = arguments

    async def closed(self, clients: int, seconds: float) -> list[Outcome]:
        """So many clients that ask again as soon as they have their answer."""
        until = _CLOCK.now() + seconds
        outcomes: list[Outcome] = []
        rng = random.Random(self._arguments.seed)

        async def one() -> None:
            while _CLOCK.now() < until:
                outcomes.append(await self._ask("closed", self._prompt(rng), "SERVICE_CLASS_BATCH"))

        await asyncio.gather(*(one() for _ in range(clients)))
        return [outcome for outcome in outcomes if outcome.done_s is not None]

    async def open(self, rates: dict[str, float], seconds: float, draw: int) -> list[Outcome]:
        """Requests of each tenant at random moments, so many a second; what a tenant asks for, and
        when, is the same for the same `draw`."""
        return [
            outcome
            for of_tenant in await asyncio.gather(
                *(self._arrivals(tenant, rate, seconds, draw) for tenant, rate in rates.items())
            )
            for outcome in of_tenant
        ]

    async def _arrivals(
        self, tenant: str, per_s: float, seconds: float, draw: int
    ) -> list[Outcome]:
        rng = random.Random(f"{self._arguments.seed} {draw} {tenant}")
        tasks: list[asyncio.Task[Outcome]] = []
        begin = _CLOCK.now()
        due = begin
        while (due := due + rng.expovariate(per_s)) < begin + seconds:
            ids = self._prompt(rng)
            await asyncio.sleep(max(0.0, due - _CLOCK.now()))
            tasks.append(asyncio.create_task(self._ask(tenant, ids)))
        return await asyncio.gather(*tasks)

    def _prompt(self, rng: random.Random) -> list[int]:
        return rng.choices(range(8, VOCAB), k=self._arguments.prompt)

    async def _ask(
        self, tenant: str, ids: list[int], service_class: str = "SERVICE_CLASS_STANDARD"
    ) -> Outcome:
        request = inference_pb2.GenerateRequest(
            token_ids={"ids": ids},
            tenant=tenant,
            service_class=service_class,
            sampling={
                "max_tokens": self._arguments.answer,
                "temperature": 0.0,
                "ignore_eos": True,
            },
        )
        outcome, begin = Outcome(tenant), _CLOCK.now()
        try:
            async for response in self._stub.Generate(request, timeout=120):
                if outcome.ttft_s is None and response.token_ids:
                    outcome.ttft_s = _CLOCK.now() - begin
            outcome.done_s = _CLOCK.now() - begin
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            outcome.refused_s = _CLOCK.now() - begin
            hints = dict(error.trailing_metadata() or ())
            outcome.retry_after_ms = int(hints["grpc-retry-pushback-ms"])
        return outcome


@dataclass(slots=True, eq=False)
class Rounds:
    """What was seen in all rounds."""

    capacity_per_s: list[float] = field(default_factory=list)
    overload: list[Outcome] = field(default_factory=list)
    modest: list[Outcome] = field(default_factory=list)
    flooded: list[Outcome] = field(default_factory=list)


async def _run(address: str, arguments: argparse.Namespace) -> None:
    rounds = Rounds()
    async with grpc.aio.insecure_channel(address) as channel:
        load = Load(channel, arguments)
        warm_s = max(2.0, arguments.seconds / arguments.rounds / 4)
        await load.closed(_RUNNING_MAX * arguments.decode, warm_s)
        for number in range(arguments.rounds):
            await _round(load, rounds, number, arguments)
    _report(arguments, _summary(rounds, arguments))


async def _round(load: Load, rounds: Rounds, number: int, arguments: argparse.Namespace) -> None:
    seconds = arguments.seconds / arguments.rounds
    capacity = len(await load.closed(_RUNNING_MAX * arguments.decode, seconds)) / seconds
    rounds.capacity_per_s.append(capacity)
    _report(arguments, {"phase": "capacity", "answers_per_s": round(capacity, 2)})
    outcomes = await load.open({"all": arguments.times * capacity}, seconds, number)
    rounds.overload += outcomes
    _phase("overload", outcomes, arguments)
    names = [f"modest{each}" for each in range(arguments.others + 1)]
    modest = dict.fromkeys(names, arguments.modest * capacity)
    alone = await load.open(modest, seconds, number)
    rounds.modest += alone
    _phase("modest", alone, arguments)
    flood = modest | {"flood": arguments.times * capacity}
    every = await load.open(flood, seconds, number)
    beside = [each for each in every if each.tenant != "flood"]
    rounds.flooded += beside
    _phase("flooded", beside, arguments)


def _summary(rounds: Rounds, arguments: argparse.Namespace) -> dict[str, Any]:
    ttfts = [each.ttft_s for each in rounds.overload if each.ttft_s is not None]
    refused_ms = [1000 * each.refused_s for each in rounds.overload if each.refused_s is not None]
    capacity = sum(rounds.capacity_per_s) / len(rounds.capacity_per_s)
    good = sum(ttft <= arguments.limit for ttft in ttfts) / arguments.seconds
    late = sum(each > arguments.late_ms for each in refused_ms)
    beside, alone = (
        _rounded([each.ttft_s for each in outcomes if each.ttft_s is not None], 95)
        for outcomes in (rounds.flooded, rounds.modest)
    )
    return {
        "goodput_over_capacity": round(good / capacity, 3),
        "accepted_ttft_p95_s": _rounded(ttfts, 95),
        "late_refusals": round(late / len(refused_ms), 4) if refused_ms else None,
        "modest_p95_ratio": _ratio(beside, alone),
        "refused_p95_ms": _rounded(refused_ms, 95),
    }


def _phase(name: str, own: list[Outcome], arguments: argparse.Namespace) -> None:
    """Figures of one phase of one round."""
    ttfts = [outcome.ttft_s for outcome in own if outcome.ttft_s is not None]
    refused = [outcome.refused_s for outcome in own if outcome.refused_s is not None]
    hints = [outcome.retry_after_ms for outcome in own if outcome.retry_after_ms is not None]
    row: dict[str, Any] = {
        "phase": name,
        "asked": len(own),
        "answered": len(ttfts),
        "refused": len(refused),
        "ttft_p50_s": _rounded(ttfts, 50),
        "ttft_p95_s": _rounded(ttfts, 95),
        "refused_p50_ms": _rounded([1000 * each for each in refused], 50),
        "refused_p95_ms": _rounded([1000 * each for each in refused], 95),
        "retry_after_p50_ms": _rounded(hints, 50),
    }
    _report(arguments, row)


def _ratio(one: float | None, other: float | None) -> float | None:
    """None where a phase was too short for an answer."""
    return round(one / other, 3) if one is not None and other is not None else None


def _rounded(values: list[Any], share: float) -> float | None:
    return round(percentile(values, share), 3) if values else None


def _report(arguments: argparse.Namespace, row: dict[str, Any]) -> None:
    words = " ".join(f"{name} {value}" for name, value in row.items())
    print(json.dumps(row) if arguments.json else words, flush=True)  # noqa: T201


def _config(arguments: argparse.Namespace) -> ClusterConfig:
    scheduler = SchedulerConfig(chunk_tokens=arguments.chunk, running_max=_RUNNING_MAX)
    config = digest.digest_config(_PAGE, _SLOTS, radix=False, scheduler=scheduler)
    standard = ServiceClassConfig(ttft_limit_s=arguments.limit, weight=2.0)
    router = RouterConfig(classes=ServiceClassesConfig(standard=standard))
    return replace(config, router=router, cache=replace(config.cache, audit=False))


def main() -> None:
    """Start the cluster, run the phases, report."""
    arguments = _parse()
    roles = [Role.PREFILL] * arguments.prefill + [Role.DECODE] * arguments.decode
    runner = _paced_runner(arguments.token_ms / 1000, arguments.step_ms / 1000)
    with (
        patch.object(digest, "_WorkerRunner", runner),
        digest.digest_cluster(_config(arguments), roles) as cluster,
    ):
        asyncio.run(_run(cluster.address, arguments))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each kind of phase")
    parser.add_argument("--rounds", type=int, default=3, help="of all phases, in turn")
    parser.add_argument("--times", type=float, default=3.0, help="overload, of the capacity")
    parser.add_argument("--limit", type=float, default=2.0, help="ttft_limit_s")
    parser.add_argument("--late-ms", type=float, default=100.0, help="a refusal after that is late")
    parser.add_argument("--prompt", type=int, default=400, help="tokens")
    parser.add_argument("--chunk", type=int, default=32, help="scheduler.chunk_tokens")
    parser.add_argument("--answer", type=int, default=20, help="tokens")
    parser.add_argument("--token-ms", type=float, default=1.0, help="of one prompt token")
    parser.add_argument("--step-ms", type=float, default=10.0, help="of one decode step")
    parser.add_argument("--prefill", type=int, default=2, help="prefill workers")
    parser.add_argument("--decode", type=int, default=2, help="decode workers")
    parser.add_argument("--modest", type=float, default=0.1, help="of the capacity, per tenant")
    parser.add_argument("--others", type=int, default=3, help="tenants beside the first one")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
