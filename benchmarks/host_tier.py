"""What the host tier is worth: hits on a working set of 4x the device pool, and TTFT of a hit.

    python -m benchmarks.host_tier --json [--prompt 512 2048] [--rounds 5] [--skip-ttft]

One JSON object a line.

* {"what": "hits", "write_policy", "device_tokens", "working_set_tokens", "host_tokens",
  "device_hit_tokens", "host_hit_tokens", "infinite_hit_tokens", "share"}: conversations that
  together hold 4x the device pool take turns in random order; `share` is what device and host
  found of what a cache without bounds finds in the same run.
* {"what": "ttft", "prompt_tokens", "recompute_ms", "host_hit_ms", "device_hit_ms", "speedup"}: the
  real model, one request at a time: never seen, loaded back, on the device. Medians over rounds,
  each of which asks the same prompt in the three ways.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
from typing import TYPE_CHECKING

import numpy as np

from engine.engine import Engine
from engine.model_directory import resolve_model
from engine.model_runner import ModelRunner
from engine.model_spec import load_spec
from engine.request import Request
from kvferry.cache_key import CacheUse
from kvferry.clock import MonotonicClock
from kvferry.config import (
    BUNDLED_MODEL,
    CacheConfig,
    DType,
    HostTierConfig,
    KvDType,
    SchedulerConfig,
    WritePolicy,
)
from kvferry.ids import Attempt, AttemptId, ExtraKey, RequestId
from kvferry.sampling import SamplingParams
from mem_cache.factory import assemble_kv_cache
from mem_cache.layout import KvLayout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.request import RequestListener
    from kvferry.generation import FinishReason, OutputToken
    from kvferry.ids import TokenIds
    from mem_cache.kv_cache import KVCache

PAGE_SIZE = 16
DEVICE_TOKENS = 16_384
WORKING_SET_FACTOR = 4
COPY_TIMEOUT_S = 30.0
_SHARED = ExtraKey("")


def main() -> None:
    """Run both parts."""
    arguments = _parse()
    for policy in WritePolicy:
        _report(arguments, _hits(policy))
    if not arguments.skip_ttft:
        for tokens in arguments.prompt:
            _report(arguments, _ttft(tokens, arguments.rounds))


# --- hits -----------------------------------------------------------------------------------------


def _conversations() -> list[TokenIds]:
    """Final texts of conversations that fill the working set, 1,024 tokens each."""
    generator = np.random.default_rng(11)
    count = WORKING_SET_FACTOR * DEVICE_TOKENS // 1024
    return [generator.integers(0, 50_000, 1024, dtype=np.int32) for _ in range(count)]


def _visits(conversations: list[TokenIds]) -> Iterator[TokenIds]:
    """Each conversation again and again, in random order: only a cache of all of them hits."""
    order = random.Random(5)
    for _ in range(6):
        yield from order.sample(conversations, len(conversations))


def _hits(policy: WritePolicy) -> dict[str, object]:
    conversations = _conversations()
    working_set = sum(len(text) for text in conversations)
    layout = KvLayout(
        num_layers=1, num_kv_heads=1, head_dim=8, dtype=KvDType.FLOAT32, page_size=PAGE_SIZE
    )
    # Room for the working set, a page of each text's tail, and pages on their way.
    host_tokens = working_set + DEVICE_TOKENS
    tiered = CacheConfig(
        page_size=PAGE_SIZE,
        rows=4,
        host=HostTierConfig(memory_bytes=host_tokens * layout.bytes_per_token, write_policy=policy),
    )
    plain = CacheConfig(page_size=PAGE_SIZE, rows=4)
    bounded = assemble_kv_cache(layout, tiered, DEVICE_TOKENS, 2048)
    infinite = assemble_kv_cache(layout, plain, 2 * working_set, 2048)
    device_hits = host_hits = infinite_hits = 0
    for text in _visits(conversations):
        on_device, from_host = _visit(bounded, text)
        device_hits += on_device
        host_hits += from_host
        infinite_hits += sum(_visit(infinite, text))
    bounded.audit()
    return {
        "what": "hits",
        "write_policy": policy.value,
        "device_tokens": DEVICE_TOKENS,
        "working_set_tokens": working_set,
        "host_tokens": host_tokens,
        "device_hit_tokens": device_hits,
        "host_hit_tokens": host_hits,
        "infinite_hit_tokens": infinite_hits,
        "share": round((device_hits + host_hits) / infinite_hits, 4),
    }


def _visit(cache: KVCache, text: TokenIds) -> tuple[int, int]:
    """Hit tokens on the device and on the host of one request, which computes the rest."""
    copied = threading.Event()
    cache.on_copy_done = copied.set
    kv = cache.open("visit", text, _SHARED)
    on_device = kv.prefix_len
    cache.load_back(kv, text)
    while kv.loading_len > 0:
        assert copied.wait(COPY_TIMEOUT_S), "a copy does not end"
        copied.clear()
        cache.poll()
    cache.extend(kv, len(text))
    cache.commit(kv, len(text))
    from_host = kv.prefix_len - on_device
    cache.release(kv, text)
    while cache.copies_in_flight:
        copied.wait(0.01)
        cache.poll()
    return on_device, from_host


# --- TTFT -----------------------------------------------------------------------------------------


class _FirstToken:
    """A `RequestListener` that notes when the first token came, and what was cached."""

    def __init__(self) -> None:
        self.hit_tokens = 0
        self.came = False

    def admitted(self, request: Request) -> None:
        assert request.kv is not None, "admitted requests hold KV"
        self.hit_tokens = request.kv.prefix_len

    def computed(self, request: Request) -> None:
        """A chunk is of no interest."""

    def tokens(self, request: Request, tokens: tuple[OutputToken, ...]) -> None:
        self.came = True

    def finished(self, request: Request, reason: FinishReason) -> None:
        """The first token is what counts."""


class _Bench:
    """The real model over a device pool that holds one prompt, and a host pool that holds more."""

    def __init__(self, prompt_tokens: int) -> None:
        directory = resolve_model(BUNDLED_MODEL, progress=True)
        spec = load_spec(directory)
        layout = spec.kv_layout(KvDType.FLOAT32, PAGE_SIZE)
        self.slots = layout.round_up(prompt_tokens + 64)
        host = HostTierConfig(memory_bytes=4 * self.slots * layout.bytes_per_token)
        config = CacheConfig(page_size=PAGE_SIZE, rows=4, host=host)
        self.kv_cache = assemble_kv_cache(layout, config, self.slots, self.slots)
        runner = ModelRunner(directory, self.kv_cache.pool, threads=1, dtype=DType.FLOAT32)
        runner.warm_up()
        self.clock = MonotonicClock()
        self.engine = Engine(self.kv_cache, runner, SchedulerConfig(), self.clock)
        self.copied = threading.Event()
        self.kv_cache.on_copy_done = self.copied.set

    def ask(self, prompt: TokenIds, name: str) -> tuple[float, int]:
        """(seconds to the first token, tokens that were cached)."""
        listener: _FirstToken = _FirstToken()
        request = _request(prompt, name, listener)
        started = self.clock.now()
        self.engine.submit(request)
        while not listener.came:
            if not self.engine.step():
                assert self.copied.wait(COPY_TIMEOUT_S), "neither a step nor a copy"
                self.copied.clear()
        seconds = self.clock.now() - started
        self.settle()
        return seconds, listener.hit_tokens

    def settle(self) -> None:
        """Until all copies are done."""
        while self.kv_cache.copies_in_flight:
            self.copied.wait(0.01)
            self.kv_cache.poll()

    def push_out(self, filler: TokenIds) -> None:
        """Let another request take all of the device's slots for a moment, computing nothing."""
        kv = self.kv_cache.open("filler", filler[:1], ExtraKey("filler"))
        self.kv_cache.extend(kv, self.slots)
        self.kv_cache.release(kv, None)


def _request(prompt: TokenIds, name: str, listener: RequestListener) -> Request:
    return Request(
        id=AttemptId(RequestId(name), Attempt(1)),
        prompt=prompt,
        sampling=SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True),
        cache_use=CacheUse(_SHARED),
        eos_token_ids=(),
        listener=listener,
    )


def _ttft(prompt_tokens: int, rounds: int) -> dict[str, object]:
    bench = _Bench(prompt_tokens)
    generator = np.random.default_rng(3)
    taken: dict[str, list[float]] = {"recompute_ms": [], "host_hit_ms": [], "device_hit_ms": []}
    whole = (prompt_tokens - 1) // PAGE_SIZE * PAGE_SIZE
    for turn in range(rounds):
        prompt = generator.integers(100, 40_000, prompt_tokens, dtype=np.int32)
        for way, expected in zip(taken, (0, whole, whole), strict=True):
            if way != "device_hit_ms":
                bench.push_out(prompt)
            seconds, hit = bench.ask(prompt, f"{turn}-{way}")
            assert hit == expected, f"{way}: {hit} tokens were cached, not {expected}"
            taken[way].append(1e3 * seconds)
    medians = {way: round(statistics.median(values), 1) for way, values in taken.items()}
    speedup = medians["recompute_ms"] / medians["host_hit_ms"]
    return {"what": "ttft", "prompt_tokens": prompt_tokens, **medians, "speedup": round(speedup, 1)}


def _report(arguments: argparse.Namespace, row: dict[str, object]) -> None:
    text = json.dumps(row) if arguments.json else " ".join(f"{k}={v}" for k, v in row.items())
    print(text, flush=True)  # noqa: T201


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--prompt", type=int, nargs="+", default=[512, 2048], help="tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--skip-ttft", action="store_true", help="hits only: no model needed")
    return parser.parse_args()


if __name__ == "__main__":
    main()
