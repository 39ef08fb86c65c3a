"""What disaggregation adds to the first two tokens of a request, on a real local cluster.

One aggregated worker against one prefill and one decode worker, one compute thread each, so both
compute a prompt at the same speed and the difference is the handoff. Clusters alternate, each
started `rounds` times; every prompt is new, so nothing is hit. Figures are medians.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from cluster.local_cluster import LocalCluster, with_model_directory
from engine.model_directory import resolve_model
from kvferry.clock import MonotonicClock
from kvferry.config import load_config
from kvferry.rpc.v1 import inference_pb2 as inference
from kvferry.rpc.v1 import inference_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPT_TOKENS = (128, 1024, 3000)
_REPEATS_PER_START = 3
_SHAPES = {
    "aggregated": {
        "workers.both.count": "1",
        "workers.prefill.count": "0",
        "workers.decode.count": "0",
    },
    "pd": {},
}


@dataclass(frozen=True, slots=True)
class FirstTwo:
    """Seconds from sending a request to its first and to its second token."""

    first_s: float
    second_s: float


def measure(rounds: int) -> Iterator[dict[str, object]]:
    """One record per prompt length."""
    samples: dict[tuple[str, int], list[FirstTwo]] = {}
    rng = random.Random(0)
    for _ in range(rounds):
        for shape, overrides in _SHAPES.items():
            for length, sample in _run_cluster(overrides, rng):
                samples.setdefault((shape, length), []).append(sample)
    for length in PROMPT_TOKENS:
        record: dict[str, object] = {"kind": "latency", "prompt_tokens": length}
        for shape in _SHAPES:
            taken = samples[shape, length]
            record[f"{shape}_ttft_s"] = _median([sample.first_s for sample in taken])
            record[f"{shape}_second_token_s"] = _median([sample.second_s for sample in taken])
        yield record


def _run_cluster(overrides: dict[str, str], rng: random.Random) -> Iterator[tuple[int, FirstTwo]]:
    config = load_config(None, {}, overrides | {"router.port": "0"})
    config = with_model_directory(config, resolve_model(config.model.path))
    clock = MonotonicClock()
    with (
        LocalCluster(config, clock) as cluster,
        grpc.insecure_channel(cluster.address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        _first_two(stub, clock, rng, 64)
        for _ in range(_REPEATS_PER_START):
            for length in PROMPT_TOKENS:
                yield length, _first_two(stub, clock, rng, length)


def _first_two(
    stub: inference_pb2_grpc.InferenceStub, clock: MonotonicClock, rng: random.Random, length: int
) -> FirstTwo:
    ids = [rng.randrange(1000, 40_000) for _ in range(length)]
    request = inference.GenerateRequest(
        token_ids=inference.TokenIds(ids=ids),
        sampling=inference.SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True),
    )
    started = clock.now()
    arrivals: list[float] = []
    for response in stub.Generate(request, timeout=300):
        arrivals += [clock.now() - started] * len(response.token_ids)
    assert len(arrivals) == 2, f"{len(arrivals)} tokens instead of 2"
    return FirstTwo(*arrivals)


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 4)
