"""The simulator against a real cluster, on the same requests.

    python -m benchmarks.simulator_accuracy --json [--trace PATH] [--block 128] [--requests 60]
                                                   [--load 0.5] [--prefill 1] [--decode 1]
                                                   [--threads 1] [--rounds 3] [--seed 0]
                                                   [--keep DIRECTORY] [--set NAME=VALUE ...]

A real local cluster with the real model. It is profiled first, as `kvferry bench profile` does it;
then requests of a trace in Mooncake's format are sent to it at their times, and the simulator plays
the same requests against the same configuration by the timing model of the profile. Of the trace
its prompts' blocks of 512 tokens are made `--block` tokens long, and lengths with them, so that
they fit into the model's context. `--load`: share of the time that prefill workers compute, by the
profile and as if nothing were cached, which gives the rate.

The last line has, of both, hit tokens, p50 and p90 of the time to a first token, and the ratios
simulated / measured. `--keep` writes the timing model and one line per request, of both.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.grpc_endpoint import GrpcEndpoint
from bench.plan import EndpointPlan, LoadPlan, RunPlan
from bench.profile import Profiler
from bench.record import LoadMode, Outcome
from bench.sender import Sender
from bench.workload import Planned, TokenSource
from bench.workload import Workload as SentWorkload
from benchmarks.command_line import as_text, setting
from cluster.client import Client
from cluster.commands.bench_profile import layers_of, plan_of
from cluster.local_cluster import LocalCluster, with_model_directory
from engine.model_directory import resolve_model
from kvferry.clock import MonotonicClock
from kvferry.config import load_config
from simulator.profile_fit import fit_timing
from simulator.settings import SimSettings
from simulator.simulation import Simulation
from simulator.workload import Workload, read_workload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.answer import Answer
    from bench.workload import Prompt
    from kvferry.config import ClusterConfig
    from simulator.attempt import Asked
    from simulator.timing import WorkerTiming

_TRACE = Path(__file__).parent.parent / "tests/data/mooncake/conversation_30_rows.jsonl"
_TRACE_BLOCK_TOKENS = 512
_ANSWER_MAX = 64
_CALL_TIMEOUT_S = 300.0
_LEAD_S = 0.5
"""In which the first prompt is made."""
_PAGE, _END = range(2)
_CLOCK = MonotonicClock()


@dataclass(frozen=True, slots=True)
class Seen:
    """What became of one request."""

    ttft_s: float
    cached_tokens: int
    prefill_worker: str | None
    decode_worker: str | None


def main() -> None:
    """Profile, replay, simulate, compare."""
    arguments = _parse()
    config = _config(arguments)
    asked: list[Asked] = []
    with LocalCluster(config, _CLOCK) as cluster, Client(cluster.address) as client:
        timing = _profiled(client, config, arguments)
        workload = _scaled(read_workload(arguments.trace, arguments.seed), arguments.block)
        rate = _rate(workload, timing, arguments)
        requests = workload.requests(
            arguments.requests, rate, config.cache.page_size, arguments.seed
        )
        asked = list(requests)
        loads = [os.getloadavg()[0]]
        measured = _replay(client, cluster.address, asked, config.cache.page_size)
        loads.append(os.getloadavg()[0])
    simulated = _simulated(config, timing, asked)
    if arguments.keep is not None:
        _keep(arguments.keep, timing, asked, measured, simulated)
    row = _comparison(measured, simulated)
    row |= {"rate": round(rate, 3), "load_average": [round(load, 2) for load in loads]}
    print(json.dumps(row) if arguments.json else as_text(row), flush=True)  # noqa: T201


def _config(arguments: argparse.Namespace) -> ClusterConfig:
    threads = {f"workers.{role}.threads": str(arguments.threads) for role in ("prefill", "decode")}
    given = {
        "router.port": "0",
        "workers.prefill.count": str(arguments.prefill),
        "workers.decode.count": str(arguments.decode),
        **threads,
        **dict(arguments.set),
    }
    config = load_config(None, {}, given)
    return with_model_directory(config, resolve_model(config.model.path))


def _profiled(client: Client, config: ClusterConfig, arguments: argparse.Namespace) -> WorkerTiming:
    info = client.model_info()
    plan = plan_of(config, info.context_length, info.page_size, arguments.rounds)

    def report(text: str) -> None:
        print(text, file=sys.stderr, flush=True)  # noqa: T201

    profile = Profiler(client, plan, _CLOCK, time.sleep, report).run()
    layers = layers_of(Path(config.model.path))
    timing = fit_timing(profile, layers, arguments.error_max, {"workers": profile.workers})
    report(timing.text())
    return timing


def _scaled(workload: Workload, block_tokens: int) -> Workload:
    share = block_tokens / _TRACE_BLOCK_TOKENS
    patterns = [
        dataclasses.replace(
            each,
            prompt_tokens=max(1, round(share * each.prompt_tokens)),
            answer_tokens=min(each.answer_tokens, _ANSWER_MAX),
        )
        for each in workload.patterns
    ]
    return Workload(workload.name, block_tokens, patterns)


def _rate(workload: Workload, timing: WorkerTiming, arguments: argparse.Namespace) -> float:
    """Requests per second for the load that is asked for."""
    lengths = [each.prompt_tokens for each in workload.patterns]
    seconds = [timing.times.prompts_s(n, n * (n - 1) / 2) for n in lengths]
    return float(arguments.load * arguments.prefill / np.mean(seconds))


@dataclass(frozen=True, slots=True)
class _Prompts:
    """Equal ids, equal tokens; what fills no page is the request's own."""

    asked: Sequence[Asked]
    page_size: int
    tokens: TokenSource

    def prompt(self, index: int) -> Prompt:
        """[tokens] int32."""
        asked = self.asked[index]
        full, rest = divmod(asked.prompt_tokens, self.page_size)
        pages = [self.tokens.tokens(self.page_size, _PAGE, page) for page in asked.ids[:full]]
        return np.concatenate([*pages, self.tokens.tokens(rest, _END, index)])


def _replay(client: Client, address: str, asked: Sequence[Asked], page_size: int) -> list[Seen]:
    """Send each request at its time, as `kvferry bench run` does."""
    planned = [
        Planned(chain=number, session=number, answer_tokens=each.answer_tokens, at_s=each.at_s)
        for number, each in enumerate(asked)
    ]
    prompts = _Prompts(asked, page_size, TokenSource(0, client.model_info().vocab_size))
    workload = SentWorkload("trace", tuple(planned), tuple(range(len(planned))), prompts)
    plan = RunPlan(
        endpoint=EndpointPlan(addresses=(address,)),
        load=LoadPlan(mode=LoadMode.REPLAY),
        deadline_s=_CALL_TIMEOUT_S,
    )
    return asyncio.run(_sent(plan, workload))


async def _sent(plan: RunPlan, workload: SentWorkload) -> list[Seen]:
    endpoint = GrpcEndpoint(plan.endpoint)
    try:
        sender = Sender(plan, workload, endpoint, _CLOCK)
        await sender.run(_CLOCK.now() + _LEAD_S)
    finally:
        await endpoint.close()
    return [_seen(answer) for answer in sorted(sender.answers, key=lambda each: each.index)]


def _seen(answer: Answer) -> Seen:
    assert answer.outcome is Outcome.DONE, f"request {answer.index}: {answer.error}"
    usage = answer.usage
    ttft_s = answer.arrivals[0][0] - answer.scheduled_at
    return Seen(ttft_s, usage.cached_tokens or 0, usage.prefill_worker, usage.decode_worker)


def _simulated(config: ClusterConfig, timing: WorkerTiming, asked: Sequence[Asked]) -> list[Seen]:
    settings = SimSettings.of(config, timing.times.kv_bytes_per_token)
    workers = settings.prefill + settings.decode + settings.both
    settings = dataclasses.replace(settings, workers_per_host=workers)
    longest = max(each.prompt_tokens + each.answer_tokens for each in asked)
    simulation = Simulation(settings, timing.times, longest)
    columns = simulation.run(iter(asked))
    simulation.check_idle()
    found = zip(
        columns.ttft_s().tolist(),
        np.nan_to_num(columns.column("cached_tokens")).astype(int).tolist(),
        columns.texts("prefill_worker"),
        columns.texts("decode_worker"),
        strict=True,
    )
    return [Seen(*each) for each in found]


def _comparison(measured: Sequence[Seen], simulated: Sequence[Seen]) -> dict[str, Any]:
    row: dict[str, Any] = {"requests": len(measured)}
    hits = [sum(each.cached_tokens for each in seen) for seen in (measured, simulated)]
    row |= {"hit_tokens_measured": hits[0], "hit_tokens_simulated": hits[1]}
    row["hit_tokens_ratio"] = round(hits[1] / hits[0], 4) if hits[0] else None
    for share in (50, 90):
        real, sim = (
            float(np.percentile([each.ttft_s for each in seen], share))
            for seen in (measured, simulated)
        )
        row |= {
            f"ttft_p{share}_measured_s": round(real, 4),
            f"ttft_p{share}_simulated_s": round(sim, 4),
            f"ttft_p{share}_ratio": round(sim / real, 4),
        }
    return row


def _keep(
    directory: Path,
    timing: WorkerTiming,
    asked: Sequence[Asked],
    measured: Sequence[Seen],
    simulated: Sequence[Seen],
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "timing.json").write_text(timing.text(), encoding="utf-8")
    with (directory / "requests.jsonl").open("w", encoding="utf-8") as file:
        for request, real, sim in zip(asked, measured, simulated, strict=True):
            row = {
                "at_s": round(request.at_s, 3),
                "prompt_tokens": request.prompt_tokens,
                "answer_tokens": request.answer_tokens,
                "measured": dataclasses.asdict(real),
                "simulated": dataclasses.asdict(sim),
            }
            file.write(json.dumps(row) + "\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.simulator_accuracy", description=__doc__)
    parser.add_argument("--json", action="store_true", help="the last line as JSON")
    parser.add_argument("--trace", type=Path, default=_TRACE, help="Mooncake's format")
    parser.add_argument("--block", type=int, default=128, help="tokens of a block of the trace")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--load", type=float, default=0.5, help="of the prefill workers")
    parser.add_argument("--prefill", type=int, default=1, help="workers")
    parser.add_argument("--decode", type=int, default=1, help="workers")
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--rounds", type=int, default=3, help="of the profile's prompts")
    parser.add_argument("--error-max", type=float, default=0.15, help="of the profile")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="write what was measured to this directory")
    parser.add_argument(
        "--set", nargs="*", type=setting, default=[], help="settings of the cluster"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
