"""What `scheduler.itl_limit_ms` does to running streams while long prompts come in.

    python -m benchmarks.itl_limit --json [--limit 0 100 150 200] [--streams 4] [--prompt 2048]
                                          [--prompts 20] [--noise 0.1]

The real engine and scheduler over the digest model of the tests, on a clock that a made-up machine
moves: so the figures depend on no other load. By default its steps cost what those of the bundled
model do on two threads: 26 ms, 2 ms per stream, 1.6 ms per prompt token and 0.3 microseconds per
token that each of these reads, all of it uneven by `--noise`, and four times that in one step of a
hundred. Prompts come one after the other; each is answered with 8 tokens.

One JSON object a limit (0: none): {"limit_ms", "itl_p50_ms", "itl_p95_ms", "itl_p99_ms",
"ttft_p50_s", "prompt_tokens_per_s"}. Gaps are those of the streams while a prompt is computed.
On a real cluster: `python -m benchmarks.interference --mode aggregated_chunked aggregated_limited`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from typing import TYPE_CHECKING

from benchmarks.token_gaps import percentile
from engine.request import Stage
from kvferry.clock import ManualClock
from kvferry.config import SchedulerConfig
from tests.support.engine_bench import EngineBench

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from engine.forward_batch import ForwardBatch
    from engine.request import Request

_STEP_S, _STREAM_S, _TOKEN_S, _PAIR_S = 0.026, 0.002, 0.0016, 3e-7
_PAUSES, _PAUSE = 0.01, 4.0
_ANSWER_TOKENS = 8


class _Machine(EngineBench):
    """An engine whose steps take their time."""

    def __init__(self, limit_ms: float, arguments: argparse.Namespace) -> None:
        config = SchedulerConfig(itl_limit_ms=limit_ms)
        slots = 2**16
        super().__init__(
            num_slots=slots, rows=64, scheduler=config, auditing=False, context_length=8192
        )
        clock = ManualClock()
        self.clock, self.engine.clock = clock, clock
        self._noise = arguments.noise
        self._rng = random.Random(0)
        self._compute = self.runner.forward
        self.runner.forward = self._forward  # type: ignore[method-assign]

    def _forward(
        self, batch: ForwardBatch, on_layers: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        seconds = _STEP_S
        attention = batch.attention
        for new, total in zip(attention.query_lengths, attention.kv_lengths, strict=True):
            if new == 1:
                seconds += _STREAM_S
            else:
                pairs = float(new) * (float(total) - float(new) / 2.0)
                seconds += _TOKEN_S * float(new) + _PAIR_S * pairs
        seconds *= self._rng.uniform(1.0 - self._noise, 1.0 + self._noise)
        self.clock.advance(seconds * (_PAUSE if self._rng.random() < _PAUSES else 1.0))
        return self._compute(batch, on_layers)

    def time_prompt(self, request: Request) -> list[float]:
        """Seconds of the steps until its first token."""
        times = [self.clock.now()]
        while request.stage in (Stage.WAITING, Stage.PREFILLING):
            assert self.engine.step(), "nothing to compute"
            times.append(self.clock.now())
        return [later - earlier for earlier, later in itertools.pairwise(times)]


def main() -> None:
    """Measure every limit and print a line for each."""
    arguments = _parse()
    for limit_ms in arguments.limit:
        record = _measure(limit_ms, arguments)
        text = json.dumps(record) if arguments.json else str(record)
        print(text, flush=True)  # noqa: T201


def _measure(limit_ms: float, arguments: argparse.Namespace) -> dict[str, float]:
    machine = _Machine(limit_ms, arguments)
    rng = random.Random(1)
    for number in range(arguments.streams):
        machine.submit(f"s{number}", [rng.randrange(200) for _ in range(64)], max_tokens=8000)
    while machine.engine.scheduler.waiting or machine.engine.steps < 10:
        machine.engine.step()
    gaps: list[float] = []
    ttfts: list[float] = []
    for number in range(arguments.prompts):
        prompt = [rng.randrange(200) for _ in range(arguments.prompt)]
        request = machine.submit(f"p{number}", prompt, max_tokens=_ANSWER_TOKENS)
        own = machine.time_prompt(request)
        gaps += own
        ttfts.append(sum(own))
        while request.stage is not Stage.ENDED:
            machine.engine.step()
    return {
        "limit_ms": limit_ms,
        "itl_p50_ms": round(1000.0 * percentile(gaps, 50), 1),
        "itl_p95_ms": round(1000.0 * percentile(gaps, 95), 1),
        "itl_p99_ms": round(1000.0 * percentile(gaps, 99), 1),
        "ttft_p50_s": round(percentile(ttfts, 50), 2),
        "prompt_tokens_per_s": round(arguments.prompt * len(ttfts) / sum(ttfts), 1),
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.itl_limit", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--limit", type=float, nargs="+", default=[0.0, 100.0, 150.0, 200.0])
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--noise", type=float, default=0.1, help="share of a step, up or down")
    return parser.parse_args()


if __name__ == "__main__":
    main()
