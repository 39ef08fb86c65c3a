"""Prefill and decode rates of this engine and of others, in turns in one run.

    python -m benchmarks.engine --json [--batch 1 8 32] [--context 128 1024] [--prefill 512 2048]
                                       [--threads 2] [--quick] [--peers llama.cpp vllm]
                                       [--skip-ready] [--int8] [--kv float16 int8]
                                       [--registered-attention]

One JSON object a line: {"engine", "what": "prefill" or "decode", "batch", "context", "threads",
"dtype", "tokens_per_s"}. A rate is the median over rounds; in each round every engine does the same
step once. Engine "limit" is what none can beat: see `benchmarks.engine_limits`. Peers are other
engines in float32, in environments of their own that `make bench-peers-setup` makes; without
`--peers`, those that are installed. `--kv`: this engine once more for each type, with KV stored
so: fewer bytes to read, and answers that are no longer those of float32.

And {"engine", "what": "ready", "threads", "compiled_before", "seconds"}: from the start of a
process to its first token, without and with what the engine compiled in earlier ones.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
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
from benchmarks.engine_ready import kvferry_ready
from benchmarks.peer_process import PeerUnavailable
from benchmarks.peers_known import PEERS, start_peer
from engine.model_directory import resolve_model
from kvferry.config import BUNDLED_MODEL, KvDType, Quantization
from kvferry.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from benchmarks.engine_contenders import Contender


def main() -> None:
    """Run the rows that the command line asks for."""
    # transformers renames arguments between the versions that we support.
    warnings.simplefilter("ignore", FutureWarning)
    arguments = _parse()
    directory = resolve_model(arguments.model, progress=True)
    modules = load_transformers(directory)
    try:
        for threads in arguments.threads:
            with contextlib.ExitStack() as processes:
                _measure(arguments, directory, modules, threads, processes)
    except (PeerUnavailable, ConfigError) as problem:
        sys.exit(str(problem))


def _measure(
    arguments: argparse.Namespace,
    directory: Path,
    modules: Any,
    threads: int,
    processes: contextlib.ExitStack,
) -> None:
    peers = []
    for name in arguments.peers:
        peer = start_peer(name, arguments.model, directory, threads)
        processes.callback(peer.close)
        peers.append(peer)
        _report_ready(arguments, name, threads, peer.compiled_before, peer.ready_s)
    if not arguments.skip_ready:
        for compiled_before, seconds in kvferry_ready(directory, threads):
            _report_ready(arguments, Kvferry.name, threads, compiled_before, seconds)
    slots = max([*arguments.prefill, *(b * (c + 1) for b, c in _decodes(arguments))])
    contenders = [*_contenders(arguments, directory, modules, threads, slots), *peers]
    for tokens in arguments.prefill:
        steps = {c.name: c.prefill(tokens) for c in contenders}
        _report(arguments, "prefill", 1, tokens, threads, steps, tokens)
    for batch, context in _decodes(arguments):
        steps = {c.name: c.decode(batch, context) for c in contenders}
        _report(arguments, "decode", batch, context, threads, steps, batch)


def _decodes(arguments: argparse.Namespace) -> Iterator[tuple[int, int]]:
    return ((batch, context) for context in arguments.context for batch in arguments.batch)


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
    if arguments.int8:
        contenders.append(Kvferry(directory, threads, slots, Quantization.INT8))
    contenders += [
        Kvferry(directory, threads, slots, kv_dtype=KvDType(name)) for name in arguments.kv
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
    steps: dict[str, Callable[[], float]],
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
        _print(arguments, row)


def _report_ready(
    arguments: argparse.Namespace, name: str, threads: int, compiled_before: bool, seconds: float
) -> None:
    row = {"engine": name, "what": "ready", "threads": threads, "compiled_before": compiled_before}
    _print(arguments, row | {"seconds": round(seconds, 1)})


def _print(arguments: argparse.Namespace, row: dict[str, object]) -> None:
    text = json.dumps(row) if arguments.json else " ".join(f"{x!s:>12}" for x in row.values())
    print(text, flush=True)  # noqa: T201


def _time_in_turns(steps: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Median seconds of each step, after one round that is not counted."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            seconds = step()
            if turn > 0:
                taken[name].append(seconds)
    return {name: statistics.median(values) for name, values in taken.items()}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=BUNDLED_MODEL)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument(
        "--context", type=int, nargs="*", default=[128, 1024], help="tokens, decode"
    )
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 2048], help="prompt tokens")
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="three rounds")
    installed = [name for name, kind in PEERS.items() if kind.is_installed]
    parser.add_argument("--peers", nargs="*", default=installed, choices=[*PEERS])
    parser.add_argument("--skip-ready", action="store_true", help="not our time to a first token")
    parser.add_argument(
        "--int8", action="store_true", help="one more engine: this one, with int8 weights"
    )
    parser.add_argument(
        "--kv",
        nargs="*",
        default=[],
        choices=[dtype.value for dtype in (KvDType.FLOAT16, KvDType.BFLOAT16, KvDType.INT8)],
        help="more engines: this one, with KV of these types",
    )
    parser.add_argument(
        "--registered-attention",
        action="store_true",
        help="one more engine: transformers' modules with our attention registered",
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = 3
    return arguments


if __name__ == "__main__":
    main()
