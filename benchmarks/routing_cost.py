"""What one routing decision costs: hash the prompt, look it up, choose the workers.

    python -m benchmarks.routing_cost --json               64 workers, 10^6 blocks, 4,000 tokens

A fleet and the configured policy as a router has them; only the workers' processes are missing.
Every worker holds the same few system prompts and conversations of its own, in blocks of 16
tokens. A request goes on with one of these conversations, or begins a new one. One row has all
workers compute and decode (`both`: one index), one has half of them do either (`split`: two).

A decision is all that lies between token ids and a route: `p50_us` and `p99_us` on the clock,
`cpu_p50_us` and `cpu_p99_us` of this process's own time, which says more on a busy machine. Of its
parts there are the medians: `hash_us`, `lookup_us` (which is asking the fleet for a view: both
indices, loads) and `choice_us`. `apply_us` is the price of the index: microseconds per block of
what workers tell, in batches of 30.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.radix_growth import CpuClock, cost_of_reading
from kvferry.accounts import KvAccounts, WorkerLoad
from kvferry.clock import MonotonicClock
from kvferry.ids import ExtraKey, Incarnation, WorkerId
from kvferry.kv_events import BlockHash, BlocksRemoved, BlocksStored, KvEventBatch
from kvferry.kv_events import prompt_block_hashes as hashes_of
from kvferry.membership import Membership, Role, WorkerInfo
from kvferry.router_config import PolicyName
from router.fleet import Fleet
from router.policy import CostModel, Demand
from router.prefix_index import PrefixIndex
from router.prompt_keys import prompt_keys
from router.route_chooser import RouteChooser
from router.worker_client import WorkerStatus

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from numpy.typing import NDArray

    from kvferry.clock import Clock
    from kvferry.errors import KvferryError
    from kvferry.ids import TokenIds
    from kvferry.kv_events import KvEvent

BLOCK_TOKENS = 16
SYSTEM_PROMPTS = 4
SYSTEM_BLOCKS = 60
CONVERSATIONS = 20
"""Of each worker, those that requests go on with."""
CHANGED_BLOCKS = 30
SHARED = ExtraKey("")


def main() -> None:
    """Print a row for each way of dividing the workers."""
    arguments = _parse()
    world = _World(arguments.workers, arguments.pages, arguments.prompt_tokens, arguments.seed)
    apply_us = round(1e6 * _apply_s(world.held, CpuClock()), 2)
    for pools in ("both", "split"):
        row = asyncio.run(_row(arguments, world, pools)) | {"apply_us": apply_us}
        text = json.dumps(row) if arguments.json else "  ".join(f"{k} {v}" for k, v in row.items())
        print(text, flush=True)  # noqa: T201


@dataclass(eq=False)
class _AbsentWorker:
    """A `WorkerClient` that answers once that it has little to do, and tells of `held`."""

    info: WorkerInfo
    held: tuple[BlockHash, ...]
    load: WorkerLoad

    async def status(self, timeout_s: float) -> WorkerStatus:
        """Some load."""
        accounts = KvAccounts(900_000, 0, 100_000, 0, 0, 10**6, 0, 0, 512)
        return WorkerStatus(self.info.incarnation, self.load, accounts, None, 1, {})

    async def kv_events(self) -> AsyncGenerator[KvEventBatch, None]:
        """One snapshot, then nothing."""
        held = (BlocksStored(self.held),)
        yield KvEventBatch(self.info.worker_id, self.info.incarnation, 0, True, held)
        await asyncio.Event().wait()

    def generate(self, request: object, timeout_s: float) -> Any:
        """Nobody asks here."""
        raise NotImplementedError

    async def audit(self, timeout_s: float) -> Any:
        """Nobody asks here."""
        raise NotImplementedError

    def abort_streams(self, error: KvferryError) -> None:
        """There are none."""

    async def close(self) -> None:
        """There is no connection."""


class _World:
    """What the workers hold, and what clients ask."""

    def __init__(self, workers: int, blocks: int, prompt_tokens: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self._prompt_tokens = prompt_tokens
        self.prompts: list[TokenIds] = []
        """Conversations that somebody holds."""
        self._systems = [self._tokens(SYSTEM_BLOCKS * BLOCK_TOKENS) for _ in range(SYSTEM_PROMPTS)]
        shared = [hash_ for system in self._systems for hash_ in self._hashes(system)]
        own = (blocks - len(shared)) // workers
        self.held = [self._worker_blocks(shared, own) for _ in range(workers)]

    def request(self) -> TokenIds:
        """Half goes on with a conversation, half is new but for its system prompt."""
        if self.rng.random() < 0.5:
            known = self.prompts[int(self.rng.integers(len(self.prompts)))]
            kept = int(self.rng.integers(SYSTEM_BLOCKS * BLOCK_TOKENS, self._prompt_tokens))
            return np.concatenate([known[:kept], self._tokens(self._prompt_tokens - kept)])
        return self._conversation()

    def _worker_blocks(self, shared: list[BlockHash], own: int) -> tuple[BlockHash, ...]:
        blocks: list[BlockHash] = []
        for _ in range(CONVERSATIONS):
            conversation = self._conversation()
            self.prompts.append(conversation)
            blocks += self._hashes(conversation)[SYSTEM_BLOCKS:]
        # Of those that nobody will ask for again, the hashes are as good as the tokens.
        others = self.rng.integers(1, 2**64, max(0, own - len(blocks)), dtype=np.uint64).tolist()
        return (*shared, *blocks[:own], *others)

    def _conversation(self) -> TokenIds:
        system = self._systems[int(self.rng.integers(SYSTEM_PROMPTS))]
        return np.concatenate([system, self._tokens(self._prompt_tokens - len(system))])

    def _tokens(self, count: int) -> TokenIds:
        return self.rng.integers(0, 50_000, count, dtype=np.int32)

    def _hashes(self, tokens: TokenIds) -> list[BlockHash]:
        return hashes_of(tokens, BLOCK_TOKENS, SHARED)


async def _row(arguments: argparse.Namespace, world: _World, pools: str) -> dict[str, Any]:
    workers = arguments.workers
    infos = [_info(number, workers, pools) for number in range(workers)]
    fleet = await _fleet(infos, world)
    try:
        spent = _decide(fleet, world, arguments)
        reports = fleet.index_reports().values()
        nbytes, indexed = sum(r.nbytes for r in reports), sum(r.blocks for r in reports)
    finally:
        await fleet.stop()
    parts = ("hash", "lookup", "choice")
    decision = np.sum([spent[part] for part in parts], axis=0)
    return {
        "workers": workers,
        "pages": indexed,
        "prompt_tokens": arguments.prompt_tokens,
        "pools": pools,
        "policy": arguments.policy,
        "p50_us": _quantile_us(decision, 0.5),
        "p99_us": _quantile_us(decision, 0.99),
        "cpu_p50_us": _quantile_us(spent["cpu"], 0.5),
        "cpu_p99_us": _quantile_us(spent["cpu"], 0.99),
        **{f"{part}_us": _quantile_us(spent[part], 0.5) for part in parts},
        "bytes_per_block": round(nbytes / indexed, 1),
        "decisions": arguments.decisions,
    }


def _quantile_us(seconds: Sequence[float] | NDArray[np.float64], share: float) -> float:
    return round(1e6 * float(np.quantile(seconds, share)), 1)


def _info(number: int, workers: int, pools: str) -> WorkerInfo:
    role = Role.BOTH
    if pools == "split":
        role = Role.PREFILL if number < workers // 2 else Role.DECODE
    return WorkerInfo(WorkerId(f"worker-{number}"), role, Incarnation(1), f"host:{number}")


async def _fleet(infos: Sequence[WorkerInfo], world: _World) -> Fleet:
    """A fleet that has heard of everything."""
    rng = random.Random(0)
    clients = {
        info.worker_id: _AbsentWorker(info, held, _some_load(rng))
        for info, held in zip(infos, world.held, strict=True)
    }
    fleet = Fleet(
        clock=MonotonicClock(),
        block_tokens=BLOCK_TOKENS,
        status_interval_s=3600.0,
        connect=lambda info: clients[info.worker_id],
    )
    await fleet.set_membership(Membership(1, tuple(infos)))
    expected = sum(len(held) for held in world.held)
    while sum(summary.indexed_blocks for summary in fleet.summaries()) < expected:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return fleet


def _some_load(rng: random.Random) -> WorkerLoad:
    return WorkerLoad(
        running=rng.randrange(16),
        waiting=rng.randrange(4),
        waiting_tokens=rng.randrange(4000),
        handoffs=0,
        prefill_tokens_per_s=8000.0,
        link_bytes_per_s=1e9,
    )


def _decide(
    fleet: Fleet, world: _World, arguments: argparse.Namespace
) -> Mapping[str, list[float]]:
    """Seconds of the parts of each decision, and of CPU of the whole one."""
    model = CostModel(kv_bytes_per_token=131_072, running_max=64)
    clock, cpu = MonotonicClock(), CpuClock()
    chooser = RouteChooser(PolicyName(arguments.policy), model, BLOCK_TOKENS, clock)
    demand = Demand(arguments.prompt_tokens, 256)
    rng, reading_s = random.Random(arguments.seed), cost_of_reading(cpu)
    spent: dict[str, list[float]] = {"hash": [], "lookup": [], "choice": [], "cpu": []}
    for number in range(-arguments.decisions // 10, arguments.decisions):
        prompt = world.request()
        cpu_began = cpu.now()
        began = clock.now()
        keys = prompt_keys(prompt, BLOCK_TOKENS, SHARED)
        hashed = clock.now()
        view = fleet.view(keys)
        found = clock.now()
        chooser.choose(view, demand, keys, frozenset(), rng)
        chosen = clock.now()
        cpu_spent = cpu.now() - cpu_began - reading_s
        if number >= 0:
            spent["hash"].append(hashed - began)
            spent["lookup"].append(found - hashed)
            spent["choice"].append(chosen - found)
            spent["cpu"].append(cpu_spent)
    return spent


def _apply_s(held: Sequence[tuple[BlockHash, ...]], clock: Clock) -> float:
    """Seconds per block: median over batches that store or remove blocks of an index of `held`."""
    index, rng = PrefixIndex(), random.Random(1)
    names = [WorkerId(f"worker-{number}") for number in range(len(held))]
    for name, blocks in zip(names, held, strict=True):
        index.join(name, Incarnation(1))
        index.apply(KvEventBatch(name, Incarnation(1), 0, True, (BlocksStored(blocks),)))
    spent: list[float] = []
    for sequence in range(1, 21, 2):
        for name in names:
            blocks = tuple(BlockHash(rng.getrandbits(64)) for _ in range(CHANGED_BLOCKS))
            changes: tuple[KvEvent, ...] = (BlocksStored(blocks), BlocksRemoved(blocks))
            for number, event in enumerate(changes):
                batch = KvEventBatch(name, Incarnation(1), sequence + number, False, (event,))
                began = clock.now()
                index.apply(batch)
                spent.append(clock.now() - began)
    return float(np.median(spent)) / CHANGED_BLOCKS


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--pages", type=int, default=10**6, help="different blocks held")
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--decisions", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--policy",
        choices=[policy.value for policy in PolicyName],
        default=PolicyName.PRICED_TIME.value,
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
