"""What an operation of the prefix index costs as the index grows, in a steady state.

Conversations of four turns, 64 tokens each, at page size 16. An operation continues a random open
conversation by a turn, as a request does: match, lock, read the path's slots, insert, unlock, and
evict as much as came in. A conversation that is over is followed by a new one. A tree of n nodes
has n / 10 open conversations, so the least recent leaves are always of closed ones, every match is
complete, and nothing but the number of nodes differs between two sizes.
"""

from __future__ import annotations

import gc
import random
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvferry.ids import ExtraKey
from kvferry.kv_events import event_block_tokens
from mem_cache.radix_cache import RadixCache

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvferry.clock import Clock
    from kvferry.ids import SlotIndices, TokenIds

PAGE_SIZE = 16
TURNS = 4
TURN_TOKENS = 64
NODES_PER_OPEN_CONVERSATION = 10
OPERATIONS = 500
"""Per round: 30 ms, so that some rounds of many are not disturbed by other processes."""
SHARED = ExtraKey("")


@dataclass(slots=True)
class Spent:
    """Seconds in each operation."""

    match: float = 0.0
    lock_unlock: float = 0.0
    path: float = 0.0
    insert: float = 0.0
    evict: float = 0.0


class CpuClock:
    """Seconds that this thread ran, whatever else the machine did meanwhile."""

    def now(self) -> float:
        """Seconds of `time.thread_time`."""
        return time.thread_time()


def cost_of_reading(clock: Clock) -> float:
    """Seconds from one reading of a clock to the next."""
    reads, taken = 200, []
    for _ in range(100):
        began = clock.now()
        for _ in range(reads):
            clock.now()
        taken.append((clock.now() - began) / reads)
    return min(taken)


class Collector:
    """Seconds that Python's garbage collector took, while this object is open."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = 0.0
        self.seconds = 0.0
        self.longest = 0.0

    def __enter__(self) -> Collector:
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._began = self._clock.now()
            return
        taken = self._clock.now() - self._began
        self.seconds += taken
        self.longest = max(self.longest, taken)


class GrownTree:
    """A tree that holds `nodes` nodes of conversations, and goes on from there."""

    def __init__(self, nodes: int, clock: Clock) -> None:
        self._clock = clock
        self._reading = cost_of_reading(clock)
        self._rng = random.Random(nodes)
        self._tree = RadixCache(PAGE_SIZE, event_block_tokens(PAGE_SIZE))
        self._capacity = nodes * TURN_TOKENS
        self._open = [(number, 0) for number in range(nodes // NODES_PER_OPEN_CONVERSATION)]
        self._begun = len(self._open)
        self._next_slot = 0

    def operate(self, count: int) -> Spent:
        """Continue `count` random conversations by one turn each."""
        spent = Spent()
        for _ in range(count):
            place = self._rng.randrange(len(self._open))
            number, turns = self._open[place]
            self._operate_once(_text(number, turns + 1), spent)
            if turns + 1 == TURNS:
                number, turns = self._begun, -1
                self._begun += 1
            self._open[place] = (number, turns + 1)
        self._tree.take_events()
        return spent

    def _operate_once(self, text: TokenIds, spent: Spent) -> None:
        tree, now, slots = self._tree, self._clock.now, self._fresh_slots(len(text))
        began = now()
        node = tree.match_prefix(text[:-1], SHARED).last_device_node
        matched = now()
        tree.lock(node)
        locked = now()
        tree.path_device_indices(node)
        read = now()
        tree.insert(text, slots, SHARED)
        inserted = now()
        tree.unlock(node)
        unlocked = now()
        tree.evict(tree.evictable_size() - self._capacity)
        evicted = now()
        spent.match += matched - began - self._reading
        spent.lock_unlock += (locked - matched) + (unlocked - inserted) - 2 * self._reading
        spent.path += read - locked - self._reading
        spent.insert += inserted - read - self._reading
        spent.evict += evicted - unlocked - self._reading

    def _fresh_slots(self, count: int) -> SlotIndices:
        first = self._next_slot
        self._next_slot += count
        return np.arange(first, self._next_slot)


def growth_rows(sizes: Sequence[int], rounds: int, clock: Clock) -> Iterator[dict[str, Any]]:
    """Microseconds per operation at each size: of each part its best round.

    The trees are grown first, then operated on in turns: what disturbs one disturbs the others.
    `collector_*` is Python's garbage collector while the second half of the tree was made.
    """
    trees = [_grown(nodes, clock) for nodes in sizes]
    runs = [[asdict(grown.operate(OPERATIONS)) for grown, _ in trees] for _ in range(rounds)]
    for (_, collector), nodes, spent in zip(trees, sizes, zip(*runs, strict=True), strict=True):
        best = {name: min(run[name] for run in spent) / OPERATIONS for name in spent[0]}
        row = {"nodes": nodes, "total_us": round(1e6 * sum(best.values()), 1)}
        row |= {f"{name}_us": round(1e6 * seconds, 2) for name, seconds in best.items()}
        row["collector_us"] = round(1e6 * collector.seconds / (nodes // 2), 2)
        row["collector_longest_ms"] = round(1e3 * collector.longest, 1)
        yield row


def _grown(nodes: int, clock: Clock) -> tuple[GrownTree, Collector]:
    grown, collector = GrownTree(nodes, clock), Collector(clock)
    grown.operate(nodes // 2)
    with collector:
        grown.operate(nodes // 2)
    # Everything is replaced once: what is in freed memory is slower than what was just made.
    grown.operate(max(nodes, 2_000))
    return grown, collector


def _text(number: int, turns: int) -> TokenIds:
    """The first turns of a conversation. No token is in two conversations."""
    first = number * TURNS * TURN_TOKENS
    return np.arange(first, first + turns * TURN_TOKENS, dtype=np.int32)
