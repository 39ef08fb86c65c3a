"""What the ledger's checks cost: the cheap ones in a decode step, all of them in an audit.

    python -m benchmarks.ledger --json [--batch 1 8 32] [--slots 100000]

Decode: what `KVCache` does in a step (extend and commit of each sequence; a page of 16 tokens is
taken in every sixteenth step, from evicted cache) is timed as it is and, in turns with it, with
all checks removed: the same source compiled without assertions, `require_live` put out of action.
The difference is set against the step of the real model. Audit: every check in full, over a tree
of thousands of nodes and live requests, which share prefixes and have private tails.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import json
import statistics
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.engine_contenders import Kvferry
from benchmarks.radix_growth import CpuClock
from engine.model_directory import resolve_model
from kvferry.clock import MonotonicClock
from kvferry.config import BUNDLED_MODEL, CacheConfig, KvDType
from kvferry.ids import ExtraKey

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import CodeType, ModuleType

    from kvferry.clock import Clock
    from kvferry.ids import TokenIds
    from mem_cache.kv_cache import KVCache
    from mem_cache.request_kv import RequestKV

PAGE_SIZE = 16
CONTEXT = 128
STEPS = 256
"""Decode steps of one round: each sequence takes a page sixteen times."""
AUDITED_PROMPT = 64
AUDITED_LIVE = 64
SHARED = ExtraKey("")


def main() -> None:
    """Print the rows that the command line asks for."""
    arguments = _parse()
    clock = CpuClock() if arguments.cpu_time else MonotonicClock()
    rows = [audit_row(arguments.slots, arguments.rounds, clock)]
    if arguments.batch:
        directory = resolve_model(arguments.model, progress=True)
        rows += decode_rows(directory, arguments.batch, arguments.rounds, clock)
    for row in rows:
        text = json.dumps(row) if arguments.json else "  ".join(f"{k} {v}" for k, v in row.items())
        print(text, flush=True)  # noqa: T201


# --- cheap checks, in a decode step ---------------------------------------------------------


def decode_rows(
    directory: Path, batches: list[int], rounds: int, clock: Clock
) -> Iterator[dict[str, Any]]:
    """For each batch size the model's step, and the KV part of it with and without checks."""
    slots = max(batches) * (CONTEXT + PAGE_SIZE)
    engine = Kvferry(directory, threads=1, num_slots=slots)
    with_checks, without_checks = Package.imported(), Package.without_checks()
    for batch in batches:
        checked = DecodeSteps(_decode_cache(with_checks, batch), batch, clock)
        bare = DecodeSteps(_decode_cache(without_checks, batch), batch, clock)
        # In turns: what disturbs one disturbs the other.
        pairs = [(checked.round(), bare.round()) for _ in range(rounds)]
        kv, kv_bare = (min(times) / STEPS for times in zip(*pairs, strict=True))
        step = _step_seconds(engine, batch, rounds, clock)
        yield {
            "what": "decode",
            "batch": batch,
            "context": CONTEXT,
            "step_ms": round(1e3 * step, 2),
            "kv_us": round(1e6 * kv, 1),
            "kv_without_checks_us": round(1e6 * kv_bare, 1),
            "checks_us": round(1e6 * (kv - kv_bare), 1),
            "checks_percent": round(100 * (kv - kv_bare) / step, 3),
        }


class DecodeSteps:
    """The KV side of decoding a batch, in a pool whose every page is in use or cached."""

    def __init__(self, cache: KVCache, batch: int, clock: Clock) -> None:
        self._cache = cache
        self._batch = batch
        self._clock = clock
        self._prompts = 0

    def round(self) -> float:
        """Seconds of `STEPS` steps of the whole batch."""
        kvs = [self._open() for _ in range(self._batch)]
        began = self._clock.now()
        for length in range(CONTEXT + 1, CONTEXT + 1 + STEPS):
            for kv in kvs:
                self._cache.extend(kv, length)
                self._cache.commit(kv, length)
        taken = self._clock.now() - began
        for kv in kvs:
            # Published, so that the next round must evict.
            self._cache.release(kv, _tokens(self._prompts, CONTEXT + STEPS))
            self._prompts += 1
        return taken

    def _open(self) -> RequestKV:
        kv = self._cache.open("decode", _tokens(2**20, 0), SHARED)
        self._cache.extend(kv, CONTEXT)
        self._cache.commit(kv, CONTEXT)
        return kv


def _step_seconds(engine: Kvferry, batch: int, rounds: int, clock: Clock) -> float:
    step = engine.decode(batch, CONTEXT)
    step()
    taken: list[float] = []
    for _ in range(rounds):
        began = clock.now()
        step()
        taken.append(clock.now() - began)
    return statistics.median(taken)


def _decode_cache(package: Package, batch: int) -> KVCache:
    length = CONTEXT + STEPS
    return package.new_cache(2 * batch * length, rows=batch, context_length=length)


# --- checks removed -------------------------------------------------------------------------


class _WithoutAssertions(importlib.machinery.SourceFileLoader):
    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> CodeType:
        return compile(data, path, "exec", dont_inherit=True, optimize=1)

    def get_code(self, fullname: str) -> CodeType:
        # Not from the cache of compiled files, and not into it.
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


class _UncheckedImports(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if not name.startswith("mem_cache"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None, f"{name} is not to be found"
        assert spec.origin is not None, f"{name} has no file"
        spec.loader = _WithoutAssertions(name, spec.origin)
        return spec


@dataclass(frozen=True, slots=True)
class Package:
    """What is needed of one copy of `mem_cache`."""

    factory: ModuleType
    layout: ModuleType
    kv_cache: ModuleType

    @classmethod
    def imported(cls) -> Package:
        """The copy that an import finds now."""
        names = ("factory", "layout", "kv_cache")
        return cls(*(importlib.import_module(f"mem_cache.{name}") for name in names))

    @classmethod
    def without_checks(cls) -> Package:
        """A second copy, without assertions; the first one stays what other imports find."""
        checked = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_ours(name)}
        finder = _UncheckedImports()
        sys.meta_path.insert(0, finder)
        try:
            package = cls.imported()
        finally:
            sys.meta_path.remove(finder)
            for name in [name for name in sys.modules if _is_ours(name)]:
                del sys.modules[name]
            sys.modules.update(checked)
        package.kv_cache.__dict__["require_live"] = lambda _books, kv: kv.req_pool_idx
        return package

    def new_cache(self, slots: int, rows: int, context_length: int) -> KVCache:
        """A one-tier cache of a tiny model: what is in the slots does not matter here."""
        layout = self.layout.KvLayout(
            num_layers=1, num_kv_heads=1, head_dim=2, dtype=KvDType.FLOAT32, page_size=PAGE_SIZE
        )
        config = CacheConfig(page_size=PAGE_SIZE, rows=rows)
        cache: KVCache = self.factory.assemble_kv_cache(layout, config, slots, context_length)
        return cache


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] == "mem_cache"


# --- the full audit -------------------------------------------------------------------------


def audit_row(slots: int, rounds: int, clock: Clock) -> dict[str, Any]:
    """Milliseconds of a full audit of a worker in the middle of its work."""
    slots = slots // PAGE_SIZE * PAGE_SIZE
    cache = Package.imported().new_cache(slots, AUDITED_LIVE, context_length=2 * AUDITED_PROMPT)
    _fill(cache)
    taken: list[float] = []
    for _ in range(rounds):
        began = clock.now()
        cache.audit()
        taken.append(clock.now() - began)
    return {
        "what": "audit",
        "slots": slots,
        "nodes": sum(1 for _ in cache.tree.nodes()),
        "live_rows": len(cache.live_requests()),
        "audit_ms": round(1e3 * min(taken), 2),
        "audit_median_ms": round(1e3 * statistics.median(taken), 2),
    }


def _fill(cache: KVCache) -> None:
    """Requests that share half of their prompt with seven others; the last ones stay."""
    count = cache.num_slots * 2 // AUDITED_PROMPT + AUDITED_LIVE
    for number in range(count):
        prompt = _tokens(number, AUDITED_PROMPT)
        prompt[: AUDITED_PROMPT // 2] = _tokens(2**20 + number // 8, AUDITED_PROMPT // 2)
        kv = cache.open(f"r{number}", prompt, SHARED)
        # Each decodes a few tokens, of which the partial page stays its own.
        length = AUDITED_PROMPT + 1 + number % (3 * PAGE_SIZE)
        for step in (AUDITED_PROMPT, length):
            cache.extend(kv, step)
            cache.commit(kv, step)
            if step == AUDITED_PROMPT:
                cache.checkpoint(kv, prompt)
        if number < count - AUDITED_LIVE:
            answer = _tokens(2**21 + number, length - AUDITED_PROMPT)
            cache.release(kv, np.concatenate([prompt, answer]))


def _tokens(number: int, count: int) -> TokenIds:
    """A text of its own for each number."""
    return np.arange(number * 1_000, number * 1_000 + count, dtype=np.int32)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=BUNDLED_MODEL)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--slots", type=int, default=100_000, help="of the audited worker")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--cpu-time", action="store_true", help="time of this thread alone: for a busy machine"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
