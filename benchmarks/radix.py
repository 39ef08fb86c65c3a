"""What the prefix index costs: on a workload, as it grows, and in memory.

    python -m benchmarks.radix --json --workload FILE             rates, at page size 1, 16, 64
    python -m benchmarks.radix --json --workload FILE --memory    bytes of index per cached token
    python -m benchmarks.radix --json --scaling                   costs at 10^3 to 10^6 nodes

FILE is a Python file whose `requests()` yields prompts as lists of token ids. A request is:
match all but the last token, lock, read the path's slots, insert the whole prompt with fresh
slots, unlock, evict down to the capacity. Workers get prompts as arrays, so the lists are made
arrays before time counts; with `--lists` as part of the request. The event log is on and is
emptied after each request.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import struct
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from benchmarks.radix_growth import CpuClock, growth_rows
from engine.garbage import GarbageCollections
from kvferry.clock import MonotonicClock
from kvferry.ids import ExtraKey
from kvferry.kv_events import event_block_tokens
from mem_cache.radix_cache import RadixCache

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvferry.clock import Clock
    from kvferry.ids import TokenIds

    Prompt: TypeAlias = TokenIds | list[int]

CAPACITY_TOKENS = 400_000
PAGE_SIZES = (1, 16, 64)
SHARED = ExtraKey("")


def main() -> None:
    """Print the rows that the command line asks for."""
    arguments = _parse()
    clock = CpuClock() if arguments.cpu_time else MonotonicClock()
    # As in a worker; without, the collector's part of the rows is Python's own choice.
    if not arguments.python_collector:
        GarbageCollections(clock, lambda: False)
    for row in _rows(arguments, clock):
        text = json.dumps(row) if arguments.json else "  ".join(f"{k} {v}" for k, v in row.items())
        print(text, flush=True)  # noqa: T201


def _rows(arguments: argparse.Namespace, clock: Clock) -> Iterator[dict[str, Any]]:
    if arguments.scaling:
        yield from growth_rows(arguments.nodes, arguments.rounds, clock)
    if arguments.workload is None:
        return
    prompts = load_prompts(arguments.workload, as_arrays=not arguments.lists)
    for page_size in arguments.page_size:
        if arguments.memory:
            yield memory_row(prompts, page_size)
        else:
            yield rate_row(prompts, page_size, arguments.rounds, clock)


@dataclass(slots=True)
class Seconds:
    """Time spent in the parts of all requests of one run."""

    total: float = 0.0
    match: float = 0.0
    insert: float = 0.0
    evict: float = 0.0


@dataclass(slots=True)
class Replay:
    """One run of a workload against an empty index."""

    tree: RadixCache
    hit_tokens: int = 0
    next_slot: int = 0

    def request(self, prompt: Prompt) -> None:
        """Everything that the index does for one request."""
        tree, prompt = self.tree, _as_array(prompt)
        match = tree.match_prefix(prompt[:-1], SHARED)
        tree.lock(match.last_device_node)
        tree.path_device_indices(match.last_device_node)
        tree.insert(prompt, self._fresh_slots(prompt), SHARED)
        tree.unlock(match.last_device_node)
        tree.evict(tree.evictable_size() + tree.protected_size() - CAPACITY_TOKENS)
        tree.take_events()
        self.hit_tokens += match.length

    def timed_request(self, prompt: Prompt, spent: Seconds, clock: Clock) -> None:
        """The same, with the clock read around the parts. Slower, hence a run of its own."""
        tree, prompt = self.tree, _as_array(prompt)
        began = clock.now()
        match = tree.match_prefix(prompt[:-1], SHARED)
        spent.match += clock.now() - began
        tree.lock(match.last_device_node)
        tree.path_device_indices(match.last_device_node)
        slots = self._fresh_slots(prompt)
        began = clock.now()
        tree.insert(prompt, slots, SHARED)
        spent.insert += clock.now() - began
        tree.unlock(match.last_device_node)
        began = clock.now()
        tree.evict(tree.evictable_size() + tree.protected_size() - CAPACITY_TOKENS)
        spent.evict += clock.now() - began
        tree.take_events()

    def _fresh_slots(self, prompt: TokenIds) -> Any:
        first = self.next_slot
        self.next_slot += len(prompt)
        return np.arange(first, self.next_slot)


def rate_row(
    prompts: Sequence[Prompt], page_size: int, rounds: int, clock: Clock
) -> dict[str, Any]:
    """Best of `rounds` runs; the times of parts are means over all requests of their best run."""
    best = Seconds(*(float("inf"),) * 4)
    hit_tokens = 0
    for _ in range(rounds):
        replay = Replay(_new_tree(page_size))
        began = clock.now()
        for prompt in prompts:
            replay.request(prompt)
        best.total = min(best.total, clock.now() - began)
        hit_tokens = replay.hit_tokens
        replay, spent = Replay(_new_tree(page_size)), Seconds()
        for prompt in prompts:
            replay.timed_request(prompt, spent, clock)
        best.match = min(best.match, spent.match)
        best.insert = min(best.insert, spent.insert)
        best.evict = min(best.evict, spent.evict)
    return {
        "page_size": page_size,
        "requests_per_s": round(len(prompts) / best.total),
        "match_us": round(1e6 * best.match / len(prompts), 1),
        "insert_us": round(1e6 * best.insert / len(prompts), 1),
        "evict_us": round(1e6 * best.evict / len(prompts), 1),
        "hit_rate": round(hit_tokens / sum(len(prompt) for prompt in prompts), 4),
    }


def memory_row(prompts: Sequence[Prompt], page_size: int) -> dict[str, Any]:
    """Everything that a filled index keeps allocated, per token that it holds."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    replay = Replay(_new_tree(page_size))
    for prompt in prompts:
        replay.request(prompt)
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    tokens = replay.tree.evictable_size()
    return {
        "page_size": page_size,
        "nodes": sum(1 for _ in replay.tree.nodes()),
        "tokens": tokens,
        "index_bytes_per_token": round(held / tokens, 2),
    }


def _as_array(prompt: Prompt) -> TokenIds:
    """The form in which a worker has a prompt. Packing takes half the time of `np.asarray`."""
    if isinstance(prompt, np.ndarray):
        return prompt
    return np.frombuffer(struct.pack(f"<{len(prompt)}i", *prompt), dtype=np.int32)


def load_prompts(file: Path, *, as_arrays: bool) -> list[Prompt]:
    """The prompts of a workload file, as it has them or as workers have them."""
    spec = importlib.util.spec_from_file_location("workload", file)
    assert spec is not None, f"{file} is no Python file"
    assert spec.loader is not None, f"{file} cannot be loaded"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    prompts: list[list[int]] = list(module.requests())
    return [_as_array(prompt) if as_arrays else prompt for prompt in prompts]


def _new_tree(page_size: int) -> RadixCache:
    return RadixCache(page_size, event_block_tokens(page_size))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workload", type=Path, help="a Python file with requests()")
    parser.add_argument(
        "--lists", action="store_true", help="count the making of arrays of the prompts' lists too"
    )
    parser.add_argument("--memory", action="store_true", help="bytes instead of rates")
    parser.add_argument("--scaling", action="store_true", help="cost as the index grows")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument(
        "--cpu-time", action="store_true", help="time of this thread alone: for a busy machine"
    )
    parser.add_argument(
        "--python-collector",
        action="store_true",
        help="let Python decide about garbage collections, as a worker does not",
    )
    parser.add_argument("--page-size", type=int, nargs="+", default=list(PAGE_SIZES))
    parser.add_argument("--nodes", type=int, nargs="+", default=[10**n for n in (3, 4, 5, 6)])
    parser.add_argument("--rounds", type=int, default=5, help="the best one counts")
    arguments = parser.parse_args()
    if arguments.workload is None and not arguments.scaling:
        parser.error("nothing to do: give --workload FILE, --scaling or both")
    return arguments


if __name__ == "__main__":
    main()
