"""Which worker holds which prefix, exactly, from the workers' own events. Pure; no network.

Each pool has its own index (prefill workers; workers that decode): a prefix in a prefill
worker's cache saves computing, one in a decode worker's cache saves moving.

A worker's radix cache evicts leaves first, so what it holds is closed under prefixes: who holds
block k holds blocks 0..k-1. Hence one set of hashes per worker, searched by bisection: a lookup
costs log2(blocks of the prompt) per worker, dropping a dead worker costs nothing, and memory is
one set entry per block that exists somewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored
from kvferry.limits import INDEXED_BLOCKS_PER_WORKER_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvferry.ids import Incarnation, WorkerId
    from kvferry.kv_events import BlockHash, KvEvent, KvEventBatch


class EventGap(Exception):
    """Events are missing: this worker's blocks are unknown until its next snapshot."""


@dataclass(slots=True, eq=False)
class _WorkerBlocks:
    incarnation: Incarnation
    sequence: int
    blocks: set[BlockHash] = field(default_factory=set)
    is_full: bool = False
    """Blocks were left out. No more are taken before the next snapshot, which keeps the set
    closed under prefixes."""


class PrefixIndex:
    """The blocks of every worker of one pool."""

    def __init__(self, blocks_per_worker_max: int = INDEXED_BLOCKS_PER_WORKER_MAX) -> None:
        self._workers: dict[WorkerId, _WorkerBlocks] = {}
        self._blocks_max = blocks_per_worker_max

    def apply(self, batch: KvEventBatch) -> None:
        """Take the next batch of a worker's stream; one that came before is ignored.

        Raises `EventGap` when a batch is missing, and forgets the worker's blocks.
        """
        if batch.snapshot:
            known = _WorkerBlocks(batch.incarnation, batch.sequence)
            self._workers[batch.worker_id] = known
        else:
            found = self._workers.get(batch.worker_id)
            if found is None or found.incarnation != batch.incarnation:
                self.drop(batch.worker_id)
                raise EventGap(f"{batch.worker_id}: batch {batch.sequence} before any snapshot")
            if batch.sequence <= found.sequence:
                return
            if batch.sequence > found.sequence + 1:
                self.drop(batch.worker_id)
                raise EventGap(f"{batch.worker_id}: batch {batch.sequence} after {found.sequence}")
            found.sequence = batch.sequence
            known = found
        for event in batch.events:
            self._apply_event(known, event)

    def drop(self, worker_id: WorkerId) -> None:
        """Forget a worker that is dead, or whose blocks are not known any more."""
        self._workers.pop(worker_id, None)

    def hit_blocks(self, worker_id: WorkerId, prompt: Sequence[BlockHash]) -> int:
        """How many leading blocks of `prompt` the worker holds."""
        known = self._workers.get(worker_id)
        if known is None:
            return 0
        low, high = 0, len(prompt)
        while low < high:
            middle = (low + high) // 2
            if prompt[middle] in known.blocks:
                low = middle + 1
            else:
                high = middle
        return low

    def block_count(self, worker_id: WorkerId) -> int:
        """Blocks known of one worker."""
        known = self._workers.get(worker_id)
        return 0 if known is None else len(known.blocks)

    def blocks(self, worker_id: WorkerId) -> frozenset[BlockHash]:
        """A copy of what is known of one worker."""
        known = self._workers.get(worker_id)
        return frozenset() if known is None else frozenset(known.blocks)

    def _apply_event(self, known: _WorkerBlocks, event: KvEvent) -> None:
        match event:
            case BlocksStored(hashes):
                room = 0 if known.is_full else self._blocks_max - len(known.blocks)
                known.is_full = known.is_full or len(hashes) > room
                known.blocks.update(hashes[:room])
            case BlocksRemoved(hashes):
                known.blocks.difference_update(hashes)
            case AllBlocksCleared():
                known.blocks.clear()
                known.is_full = False
