"""Prefill and decode rates of the engine and of `transformers`, in turns in one run.

    python -m benchmarks.engine --json [--batch 1 8 32] [--context 128] [--prefill 512]
                                       [--threads 1] [--quick] [--registered-attention]

One JSON object a line: {"engine", "what", "batch", "context", "threads", "dtype", "tokens_per_s"}.
A rate is the median over rounds; in each round every engine does the same step once. Engine "limit"
is what none can beat: reading the weights once (decode), the layers' products alone (prefill).
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.engine_contenders import (
    Kvferry,
    RegisteredAttention,
    Transformers,
    load_transformers,
)
from benchmarks.engine_limits import Limits
from engine.model_directory import resolve_model
from kvferry.clock import MonotonicClock
from kvferry.config import BUNDLED_MODEL

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.engine_contenders import Contender


def main() -> None:
    """Run the rows that the command line asks for."""
    # transformers renames arguments between the versions that we support.
    warnings.simplefilter("ignore", FutureWarning)
    arguments = _parse()
    directory = resolve_model(arguments.model, progress=True)
    modules = load_transformers(directory)
    for threads in arguments.threads:
        slots = max([*arguments.prefill, *(b * (c + 1) for b, c in _decodes(arguments))])
        contenders = _contenders(arguments, directory, modules, threads, slots)
        for tokens in arguments.prefill:
            steps = {c.name: c.prefill(tokens) for c in contenders}
            _report(arguments, "prefill", 1, tokens, threads, steps, tokens)
        for batch, context in _decodes(arguments):
            steps = {c.name: c.decode(batch, context) for c in contenders}
            _report(arguments, "decode", batch, context, threads, steps, batch)


def _decodes(arguments: argparse.Namespace) -> list[tuple[int, int]]:
    return [(batch, context) for context in arguments.context for batch in arguments.batch]


def _contenders(
    arguments: argparse.Namespace, directory: Path, modules: Any, threads: int, slots: int
) -> list[Contender]:
    torch.set_num_threads(threads)
    kvferry = Kvferry(directory, threads, slots)
    contenders: list[Contender] = [
        kvferry,
        Transformers(modules),
        Limits(directory, threads),
    ]
    if arguments.registered_attention:
        contenders.append(RegisteredAttention(directory, kvferry, threads))
    return contenders


def _report(
    arguments: argparse.Namespace,
    what: str,
    batch: int,
    context: int,
    threads: int,
    steps: dict[str, Callable[[], None]],
    tokens: int,
) -> None:
    for name, seconds in _time_in_turns(steps, arguments.rounds).items():
        row = {
            "engine": name,
            "what": what,
            "batch": batch,
            "context": context,
            "threads": threads,
            "dtype": "float32",
            "tokens_per_s": round(tokens / seconds, 1),
        }
        text = json.dumps(row) if arguments.json else " ".join(f"{x!s:>12}" for x in row.values())
        print(text, flush=True)  # noqa: T201


def _time_in_turns(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median seconds of each step, after one round that is not counted."""
    clock = MonotonicClock()
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            before = clock.now()
            step()
            if turn > 0:
                taken[name].append(clock.now() - before)
    return {name: statistics.median(values) for name, values in taken.items()}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=BUNDLED_MODEL)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, nargs="+", default=[128], help="tokens, decode")
    parser.add_argument("--prefill", type=int, nargs="*", default=[512], help="prompt tokens")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="three rounds")
    parser.add_argument(
        "--registered-attention",
        action="store_true",
        help="a third engine: transformers' modules with our attention registered",
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = 3
    return arguments


if __name__ == "__main__":
    main()
