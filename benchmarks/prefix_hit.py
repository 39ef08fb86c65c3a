"""What a cached prefix is worth: the time to a first token of a prompt that is nearly all cached.

    python -m benchmarks.prefix_hit --json [--rounds 7] [--prompt 2048] [--cached 2000]
                                           [--threads 1] [--mode aggregated pd]
                                           [--set NAME=VALUE ...]

A real local cluster with the real model, one request at a time, through the front door. Each round
has a prompt of its own and asks for it twice with different ends: never seen, then with the first
`--cached` tokens known to the worker or, in mode `pd`, to both workers: the one that computed them
and the one that got them. What was cached is checked by the usage that each answer reports. Times
are medians over the rounds, taken where the client reads a message:

{"mode", "case": "cold" or "hit", "prompt_tokens", "cached_tokens", "ttft_ms", "ttft_over_cold",
"second_token_ms", "rounds"}.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.command_line import setting
from cluster.client import Client
from cluster.local_cluster import LocalCluster, with_model_directory
from engine.model_directory import resolve_model
from kvferry.clock import MonotonicClock
from kvferry.config import load_config
from kvferry.rpc.v1 import inference_pb2 as inference

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvferry.clock import Clock

COLD, HIT = "cold", "hit"
AGGREGATED, PD = "aggregated", "pd"
MODES = {
    AGGREGATED: {
        "workers.both.count": "1",
        "workers.prefill.count": "0",
        "workers.decode.count": "0",
    },
    PD: {},
}
"""Settings of the cluster."""
_ANSWER_TOKENS = 4
_TOKEN_IDS = (1000, 40_000)


@dataclass(frozen=True, slots=True)
class Answer:
    """When the tokens of an answer came, in seconds since it was asked, and what it cost."""

    arrivals_s: list[float]
    usage: inference.Usage


@dataclass(slots=True)
class Case:
    """All answers of one kind."""

    answers: list[Answer] = field(default_factory=list)

    def token_ms(self, number: int) -> float:
        """Median time to a token, from 0."""
        return 1000 * statistics.median(answer.arrivals_s[number] for answer in self.answers)


def main() -> None:
    """Measure the chosen modes and print a line for each case."""
    arguments = _parse()
    for mode in arguments.mode:
        for row in _rows(arguments, mode, _measure(arguments, mode)):
            text = (
                json.dumps(row) if arguments.json else "  ".join(f"{k} {v}" for k, v in row.items())
            )
            print(text, flush=True)  # noqa: T201


def _measure(arguments: argparse.Namespace, mode: str) -> dict[str, Case]:
    roles = ("prefill", "decode") if mode == PD else ("both",)
    threads = {f"workers.{role}.threads": str(arguments.threads) for role in roles}
    given = MODES[mode] | threads | {"router.port": "0"} | dict(arguments.set)
    config = load_config(None, {}, given)
    config = with_model_directory(config, resolve_model(config.model.path))
    clock = MonotonicClock()
    found = {case: Case() for case in (COLD, HIT)}
    with LocalCluster(config, clock) as cluster, Client(cluster.address) as client:
        rng = random.Random(0)
        for turn in range(arguments.rounds + 1):
            beginning = _tokens(rng, arguments.cached)
            for case in found:
                prompt = beginning + _tokens(rng, arguments.prompt - arguments.cached)
                answer = _ask(client, clock, prompt)
                _check(answer.usage, mode, 0 if case == COLD else arguments.cached)
                # The first round of a process is slower in everything.
                if turn > 0:
                    found[case].answers.append(answer)
    return found


def _ask(client: Client, clock: Clock, prompt: list[int]) -> Answer:
    request = inference.GenerateRequest(
        token_ids=inference.TokenIds(ids=prompt),
        sampling=inference.SamplingParams(
            max_tokens=_ANSWER_TOKENS, temperature=0.0, ignore_eos=True
        ),
    )
    arrivals: list[float] = []
    usage = inference.Usage()
    began = clock.now()
    for response in client.generate(request):
        arrivals += [clock.now() - began] * len(response.token_ids)
        if response.HasField("finish"):
            usage = response.finish.usage
    assert len(arrivals) == _ANSWER_TOKENS, f"{len(arrivals)} tokens, not {_ANSWER_TOKENS}"
    return Answer(arrivals, usage)


def _check(usage: inference.Usage, mode: str, cached: int) -> None:
    """That each worker had in its cache what it should have had."""
    expected = (cached, cached if mode == PD else 0)
    hits = (usage.prefill_hit_tokens, usage.decode_hit_tokens)
    assert hits == expected, f"hits of {hits} tokens, not {expected}"


def _rows(
    arguments: argparse.Namespace, mode: str, found: dict[str, Case]
) -> Iterator[dict[str, object]]:
    cold = found[COLD].token_ms(0)
    for name, case in found.items():
        first, second = case.token_ms(0), case.token_ms(1)
        yield {
            "mode": mode,
            "case": name,
            "prompt_tokens": arguments.prompt,
            "cached_tokens": 0 if name == COLD else arguments.cached,
            "ttft_ms": round(first, 1),
            "ttft_over_cold": round(first / cold, 4),
            "second_token_ms": round(second, 1),
            "rounds": len(case.answers),
        }


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(*_TOKEN_IDS) for _ in range(count)]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.prefix_hit", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--rounds", type=int, default=7, help="prompts; one more is not counted")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens")
    parser.add_argument("--cached", type=int, default=2000, help="tokens; whole pages")
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--mode", nargs="+", choices=MODES, default=[*MODES])
    parser.add_argument(
        "--set", nargs="*", type=setting, default=[], help="settings of every cluster"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
