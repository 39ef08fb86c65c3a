"""Throughput before, under and after a load that wants a multiple of the KV there is.

    python -m benchmarks.pressure --json [--clients 4] [--times 8] [--seconds 20]
                                         [--prompt 64] [--answer 96] [--reserve 0.25]

One engine with the bundled model in this process. `clients` requests are in flight all the time,
for which the KV suffices; under pressure `times` as many. Each client sends its next request when
its last one has ended; all answers are `answer` tokens long, which is the worst for optimistic
admission. In between, `drain` is the backlog alone, when the many have stopped asking. One JSON
object a phase: {"phase", "tokens_per_s", ...}; in the end {"what": "recovery",
"after_over_before", "drain_over_before", "drain_s", "back_to_95_percent_s", ...}.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.engine import Engine
from engine.model_directory import resolve_model
from engine.model_runner import ModelRunner
from engine.model_spec import load_spec
from engine.request import Request
from kvferry.cache_key import CacheUse
from kvferry.clock import MonotonicClock
from kvferry.config import BUNDLED_MODEL, CacheConfig, DType, KvDType, SchedulerConfig
from kvferry.ids import Attempt, AttemptId, ExtraKey, RequestId
from kvferry.sampling import SamplingParams
from mem_cache.factory import assemble_kv_cache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvferry.generation import FinishReason, OutputToken

_PAGE = 16
_BACK = 0.95
_CPU_TICK_S = 0.01


@dataclass(frozen=True, slots=True)
class Phase:
    """What happened while the number of clients was the same."""

    name: str
    clients: int
    seconds: float
    cpu_seconds: float
    """Of this process: says the same on a busy machine."""
    tokens: int
    ended: int
    counters: dict[str, int]

    @property
    def tokens_per_s(self) -> float:
        """Tokens of answers, recomputed ones not among them."""
        return self.tokens / self.seconds

    @property
    def tokens_per_cpu_s(self) -> float:
        """The same by the time that this process computed."""
        # The system counts in ticks, so a short phase may have taken none.
        return self.tokens / max(self.cpu_seconds, _CPU_TICK_S)


class Load:
    """Clients that are never idle, and the engine they share. A `RequestListener`."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._clock = MonotonicClock()
        self._random = np.random.default_rng(0)
        self._engine = _build_engine(arguments, self._clock)
        self.token_times: deque[float] = deque()
        self.in_flight: dict[Request, None] = {}
        self.submitted = self.ended = self.retractions_max = 0

    def admitted(self, request: Request) -> None:
        """Nothing to note."""

    def computed(self, request: Request) -> None:
        """Nothing to note."""

    def tokens(self, request: Request, tokens: tuple[OutputToken, ...]) -> None:
        """A client reads a token."""
        self.token_times.append(self._clock.now())

    def finished(self, request: Request, reason: FinishReason) -> None:
        """A client has its answer."""
        del self.in_flight[request]
        self.ended += 1
        self.retractions_max = max(self.retractions_max, request.retractions)

    def run(self, name: str, clients: int, seconds: float) -> Phase:
        """One phase, from when that many requests are in flight."""
        self._turn(clients)
        end = self._clock.now() + seconds
        return self._phase(name, clients, lambda: self._clock.now() < end)

    def drain(self, clients: int) -> Phase:
        """Until no more than `clients` requests are in flight; no new ones before."""
        return self._phase("drain", 0, lambda: len(self.in_flight) > clients)

    def _phase(self, name: str, clients: int, goes_on: Callable[[], bool]) -> Phase:
        begin, tokens, ended = self._clock.now(), len(self.token_times), self.ended
        cpu_begin = _cpu_seconds()
        counters = dict(self._engine.scheduler.counters)
        while goes_on():
            self._turn(clients)
        return Phase(
            name,
            clients,
            self._clock.now() - begin,
            _cpu_seconds() - cpu_begin,
            len(self.token_times) - tokens,
            self.ended - ended,
            {key: value - counters[key] for key, value in self._engine.scheduler.counters.items()},
        )

    def seconds_to(self, rate: float, clients: int, window_s: float) -> float:
        """Seconds until a window of `window_s` has seen `rate` tokens/s; infinite if not within
        a minute."""
        begin = self._clock.now()
        while self._clock.now() < begin + 60.0:
            self._turn(clients)
            now = self._clock.now()
            recent = sum(time > max(begin, now - window_s) for time in self.token_times)
            if now - begin >= window_s and recent / window_s >= rate:
                return now - begin
        return float("inf")

    def _turn(self, clients: int) -> None:
        while len(self.in_flight) < clients:
            request = self._next_request()
            self._engine.submit(request)
            self.in_flight[request] = None
        self._engine.step()

    def _next_request(self) -> Request:
        self.submitted += 1
        arguments = self._arguments
        # The first ones end one after the other. Otherwise the clients would begin and end together
        # until pressure mixes them up, and prompts computed together are cheaper.
        share = min(1.0, self.submitted / arguments.clients)
        answer = max(1, round(share * arguments.answer))
        return Request(
            id=AttemptId(RequestId(f"r{self.submitted}"), Attempt(1)),
            prompt=self._random.integers(1000, 40000, arguments.prompt).astype(np.int32),
            sampling=SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True),
            cache_use=CacheUse(ExtraKey("")),
            eos_token_ids=(),
            listener=self,
        )


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system


def main() -> None:
    """Run the phases and report."""
    arguments = _parse()
    load = Load(arguments)
    few, many = arguments.clients, arguments.clients * arguments.times
    load.run("warm-up", few, arguments.seconds / 4)
    before = _reported(arguments, load.run("before", few, arguments.seconds))
    _reported(arguments, load.run("pressure", many, arguments.seconds * 2))
    drain = _reported(arguments, load.drain(few))
    back_s = load.seconds_to(_BACK * before.tokens_per_s, few, arguments.window)
    after = _reported(arguments, load.run("after", few, arguments.seconds))
    load.drain(0)
    _report(
        arguments,
        {
            "what": "recovery",
            "after_over_before": round(after.tokens_per_s / before.tokens_per_s, 3),
            "after_over_before_cpu": round(after.tokens_per_cpu_s / before.tokens_per_cpu_s, 3),
            "drain_over_before": round(drain.tokens_per_s / before.tokens_per_s, 3),
            "drain_s": round(drain.seconds, 2),
            "back_to_95_percent_s": round(back_s, 2),
            "window_s": arguments.window,
            "retractions_of_one_request_max": load.retractions_max,
            "requests": load.submitted,
            "ended": load.ended,
        },
    )


def _reported(arguments: argparse.Namespace, phase: Phase) -> Phase:
    row: dict[str, object] = {
        "phase": phase.name,
        "clients": phase.clients,
        "tokens_per_s": round(phase.tokens_per_s, 1),
        "tokens_per_cpu_s": round(phase.tokens_per_cpu_s, 1),
        "seconds": round(phase.seconds, 1),
        "tokens": phase.tokens,
        "ended": phase.ended,
        **phase.counters,
    }
    _report(arguments, row)
    return phase


def _report(arguments: argparse.Namespace, row: dict[str, object]) -> None:
    text = json.dumps(row) if arguments.json else " ".join(_words(row))
    print(text, flush=True)  # noqa: T201


def _words(row: dict[str, object]) -> Iterator[str]:
    return (f"{name} {value}" for name, value in row.items())


def _build_engine(arguments: argparse.Namespace, clock: MonotonicClock) -> Engine:
    """KV for `clients` requests at their longest, and not a page more."""
    directory = resolve_model(arguments.model, progress=True)
    spec = load_spec(directory)
    layout = spec.kv_layout(KvDType.FLOAT32, _PAGE)
    longest = layout.round_up(arguments.prompt + arguments.answer)
    rows = arguments.clients * arguments.times
    kv_cache = assemble_kv_cache(
        layout, CacheConfig(page_size=_PAGE, rows=rows), longest * arguments.clients, longest
    )
    runner = ModelRunner(directory, kv_cache.pool, threads=arguments.threads, dtype=DType.FLOAT32)
    runner.warm_up()
    scheduler = SchedulerConfig(running_max=rows, output_reserve=arguments.reserve)
    return Engine(kv_cache, runner, scheduler, clock)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=BUNDLED_MODEL)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--clients", type=int, default=4, help="requests for which KV suffices")
    parser.add_argument("--times", type=int, default=8, help="pressure, as a multiple of that")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of a quiet phase")
    parser.add_argument("--window", type=float, default=2.0, help="seconds looked at for recovery")
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--answer", type=int, default=96, help="tokens")
    parser.add_argument("--reserve", type=float, default=0.25, help="scheduler.output_reserve")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
