"""What long prompts do to running streams: one core each for prefill and decode, or both shared.

    python -m benchmarks.interference --json [--rounds 1] [--seconds 60] [--mode pd ...]
                                             [--prompt 2048] [--streams 4] [--set NAME=VALUE ...]

Four greedy streams run through the front door of a real local cluster. Once all of them run,
prompts of 2,048 tokens come in one after the other for a minute, all different, each answered with
8 tokens. Modes:

* undisturbed: the streams alone, on one prefill and one decode worker of one thread and one core;
* pd: the same, with the prompts. It shares its cluster with `undisturbed`, which runs before it;
* aggregated: one worker with two threads on both cores, that computes each prompt in one step;
* aggregated_chunked: the same with the default `scheduler.chunk_tokens`;
* aggregated_limited: the same with `scheduler.itl_limit_ms` of 150.

Everything else, this program and the router included, runs on whichever core the system chooses.
Each mode begins with fresh streams and lasts equally long, because decoding slows down as streams
grow. Time is taken where the client reads a message. What is counted is the gap between two
messages of a stream that carry tokens: several tokens in one message are one gap, because a reader
sees one pause, and gaps of zero between the others would only dilute the percentiles. TTFT is that
of the 2,048-token prompts. One JSON object a mode, over all rounds: {"mode", "itl_p50_ms",
"itl_p99_ms", "itl_max_ms", "ttft_p50_s", "itl_p99_over_undisturbed", "itls", "prompts"}; null is
what a mode does not have.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.command_line import as_text, setting
from benchmarks.token_gaps import Window, gaps_in, percentile
from cluster.client import CallFailed, Client
from cluster.local_cluster import LocalCluster, with_model_directory
from engine.model_directory import resolve_model
from kvferry.clock import MonotonicClock
from kvferry.config import load_config
from kvferry.rpc.v1 import inference_pb2 as inference

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvferry.clock import Clock

UNDISTURBED = "undisturbed"
_CORES = sorted(os.sched_getaffinity(0))[:2]
_APART = {"workers.prefill.cores": str(_CORES[0]), "workers.decode.cores": str(_CORES[-1])}
_TOGETHER = {
    "workers.both.count": "1",
    "workers.both.threads": "2",
    "workers.both.cpus": "2",
    "workers.both.cores": f"{_CORES[0]},{_CORES[-1]}",
    "workers.prefill.count": "0",
    "workers.decode.count": "0",
}
_CLUSTERS: tuple[tuple[tuple[str, ...], dict[str, str]], ...] = (
    ((UNDISTURBED, "pd"), _APART),
    (("aggregated",), _TOGETHER | {"scheduler.chunk_tokens": "8192"}),
    (("aggregated_chunked",), _TOGETHER),
    (("aggregated_limited",), _TOGETHER | {"scheduler.itl_limit_ms": "150"}),
)
MODES = tuple(mode for modes, _ in _CLUSTERS for mode in modes)

_STREAM_PROMPT_TOKENS = 64
_STREAM_ANSWER_TOKENS_MAX = 4000
"""More than a stream gets in any window; a stream that ends in its window is an error."""
_STAGGER_S = 0.3
"""Between the starts of two streams, so that they are of different lengths."""
_RUNNING_TOKENS = 8
"""A stream counts as running once it has so many."""
_ANSWER_TOKENS = 8
_START_TIMEOUT_S = 120.0
_TOKEN_IDS = (1000, 40_000)


@dataclass(slots=True)
class Sample:
    """What was measured of one mode, in seconds."""

    gaps_s: list[float] = field(default_factory=list)
    ttfts_s: list[float] = field(default_factory=list)


class Stream:
    """One long answer, read in a thread of its own until `stop`."""

    def __init__(self, client: Client, clock: Clock, prompt: list[int]) -> None:
        self.arrivals: list[float] = []
        """When each message with tokens was read."""
        self._client = client
        self._clock = clock
        self._request = _request(prompt, _STREAM_ANSWER_TOKENS_MAX)
        self._stopping = threading.Event()
        self._failure: CallFailed | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Cancel the request at its next message. Raises the error that ended it before, if any."""
        ended_early = not self._thread.is_alive()
        self._stopping.set()
        self._thread.join(_START_TIMEOUT_S)
        if self._failure is not None:
            raise self._failure
        assert not ended_early, "an answer was complete before its window was over"

    def _read(self) -> None:
        try:
            for response in self._client.generate(self._request):
                if response.token_ids:
                    self.arrivals.append(self._clock.now())
                if self._stopping.is_set():
                    return
        except CallFailed as failure:
            self._failure = failure


class Load:
    """Streams and prompts of one cluster."""

    def __init__(self, client: Client, clock: Clock, rng: random.Random, count: int) -> None:
        self._client = client
        self._clock = clock
        self._rng = rng
        self._count = count

    def run(self, seconds: float, prompt_tokens: int | None) -> Sample:
        """One mode: start the streams, watch them for `seconds`, end them."""
        sample = Sample()
        streams = self._start_streams()
        start = self._clock.now()
        window = Window(start, start + seconds)
        while (left := window.stop_s - self._clock.now()) > 0.0:
            if prompt_tokens is None:
                time.sleep(left)
            else:
                sample.ttfts_s.append(self.first_token_s(prompt_tokens))
        for stream in streams:
            stream.stop()
        sample.gaps_s = gaps_in([stream.arrivals for stream in streams], window)
        return sample

    def first_token_s(self, prompt_tokens: int) -> float:
        """Seconds to the first token of a new prompt; returns when its answer is complete."""
        request = _request(self._prompt(prompt_tokens), _ANSWER_TOKENS)
        started = self._clock.now()
        first: float | None = None
        for response in self._client.generate(request):
            if first is None and response.token_ids:
                first = self._clock.now() - started
        assert first is not None, "an answer without tokens"
        return first

    def _start_streams(self) -> list[Stream]:
        streams: list[Stream] = []
        for _ in range(self._count):
            streams.append(Stream(self._client, self._clock, self._prompt(_STREAM_PROMPT_TOKENS)))
            time.sleep(_STAGGER_S)
        deadline = self._clock.now() + _START_TIMEOUT_S
        while any(len(stream.arrivals) < _RUNNING_TOKENS for stream in streams):
            assert self._clock.now() < deadline, f"no streams after {_START_TIMEOUT_S:g} s"
            time.sleep(0.05)
        return streams

    def _prompt(self, tokens: int) -> list[int]:
        return [self._rng.randrange(*_TOKEN_IDS) for _ in range(tokens)]


def main() -> None:
    """Measure the chosen modes and print a line for each."""
    arguments = _parse()
    samples = {mode: Sample() for mode in arguments.mode}
    rng = random.Random(0)
    for _ in range(arguments.rounds):
        for mode, sample in _measure_round(arguments, rng):
            samples[mode].gaps_s += sample.gaps_s
            samples[mode].ttfts_s += sample.ttfts_s
    undisturbed = samples.get(UNDISTURBED)
    base = None if undisturbed is None else percentile(undisturbed.gaps_s, 99)
    for mode, sample in samples.items():
        record = _record(mode, sample, base)
        print(json.dumps(record) if arguments.json else as_text(record), flush=True)  # noqa: T201


def _measure_round(
    arguments: argparse.Namespace, rng: random.Random
) -> Iterator[tuple[str, Sample]]:
    for modes, overrides in _CLUSTERS:
        chosen = [mode for mode in modes if mode in arguments.mode]
        if not chosen:
            continue
        settings = overrides | {"router.port": "0"} | dict(arguments.set)
        config = load_config(None, {}, settings)
        config = with_model_directory(config, resolve_model(config.model.path))
        clock = MonotonicClock()
        with LocalCluster(config, clock) as cluster, Client(cluster.address) as client:
            load = Load(client, clock, rng, arguments.streams)
            load.first_token_s(_STREAM_PROMPT_TOKENS)
            for mode in chosen:
                prompt_tokens = None if mode == UNDISTURBED else arguments.prompt
                yield mode, load.run(arguments.seconds, prompt_tokens)


def _record(mode: str, sample: Sample, undisturbed_p99_s: float | None) -> dict[str, object]:
    p99 = percentile(sample.gaps_s, 99)
    return {
        "mode": mode,
        "itl_p50_ms": round(1000 * percentile(sample.gaps_s, 50), 1),
        "itl_p99_ms": round(1000 * p99, 1),
        "itl_max_ms": round(1000 * max(sample.gaps_s), 1),
        "ttft_p50_s": round(percentile(sample.ttfts_s, 50), 2) if sample.ttfts_s else None,
        "itl_p99_over_undisturbed": (
            None if undisturbed_p99_s is None else round(p99 / undisturbed_p99_s, 2)
        ),
        "itls": len(sample.gaps_s),
        "prompts": len(sample.ttfts_s),
    }


def _request(prompt: list[int], max_tokens: int) -> inference.GenerateRequest:
    return inference.GenerateRequest(
        token_ids=inference.TokenIds(ids=prompt),
        sampling=inference.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.interference", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--rounds", type=int, default=1, help="repetitions of everything")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of a mode")
    parser.add_argument("--mode", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument(
        "--set", nargs="*", type=setting, default=[], help="settings of every cluster"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
