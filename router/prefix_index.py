"""Which worker holds which prefix, exactly, from the workers' own events. Pure; no network.

Each pool has its own index (prefill workers; workers that decode): a prefix in a prefill
worker's cache saves computing, one in a decode worker's cache saves moving.

A worker's radix cache evicts leaves first, so what it holds is closed under prefixes: who holds
block k holds blocks 0..k-1. Hence along a prompt the holders of a block only become fewer, and
the places where they do are found by bisection, for all workers together
(`docs/decisions/0020-one-index-per-pool.md`).

What is known of a worker is either its whole truth as of some sequence number, or nothing:

| batch                        | nothing known         | known up to s                         |
|------------------------------|-----------------------|---------------------------------------|
| of another incarnation       | ignored               | ignored                               |
| snapshot as of n             | known up to n         | n >= s: known up to n; else ignored   |
| changes n                    | `EventGap`            | n <= s: ignored; n = s + 1: applied,  |
|                              |                       | known up to n; else `EventGap`        |
| mark: n was the last         | `EventGap`            | n > s: `EventGap`                     |

After an `EventGap` nothing is known, and snapshots as of before it are ignored. Sequence numbers
belong to the incarnation, not to a subscription, so it does not matter which subscription of
which connection a batch came by.

A batch may also tell of prompts that its worker has accepted and not computed. They are nothing
that it holds: the index passes them on, and answers as if it had not been told.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvferry.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored
from kvferry.limits import (
    INDEXED_BLOCKS_APPLIED_AT_ONCE,
    INDEXED_BLOCKS_MAX,
    INDEXED_BLOCKS_PER_WORKER_MAX,
)
from router.holder_table import HolderTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from kvferry.ids import Incarnation, WorkerId
    from kvferry.kv_events import BlockHash, KvEvent, KvEventBatch


_NOBODY = 2**62
"""A number that no worker will ever have."""


class EventGap(Exception):
    """Events are missing: this worker's blocks are unknown until its next snapshot."""


@dataclass(frozen=True, slots=True)
class IndexedWorker:
    """What an index knows of one worker."""

    blocks: int
    known_to: int | None
    """Number of the last changes that are known; None before its first snapshot, and from a gap
    to the next one."""
    is_full: bool
    """Blocks were left out for lack of room: it holds more than is known."""

    @property
    def is_known(self) -> bool:
        """Whether requests are placed with regard to what it holds."""
        return self.known_to is not None


@dataclass(slots=True)
class EventCounts:
    """Batches since the index was made, by what became of them."""

    snapshots: int = 0
    changes: int = 0
    marks: int = 0
    repeated: int = 0
    """Ignored: what they say was known already."""
    stale: int = 0
    """Ignored: of a worker or an incarnation that is gone."""
    gaps: int = 0
    """Of which each made a worker unknown."""
    left_out: int = 0
    """Times that a worker's blocks found no room."""
    expected: int = 0
    """Prompts that workers told of before they computed them."""


@dataclass(frozen=True, slots=True)
class IndexReport:
    """The state of an index."""

    workers: int
    known_workers: int
    """Of them, those whose blocks are known. If fewer, requests are placed without regard to what
    the others hold."""
    blocks: int
    """Different blocks that are held."""
    nbytes: int
    nbytes_max: int
    counts: EventCounts


@dataclass(slots=True, eq=False)
class _WorkerBlocks:
    number: int
    incarnation: Incarnation
    sequence: int = 0
    """Known up to here; nothing older than this is believed."""
    is_known: bool = False
    count: int = 0
    refused_at: tuple[int, int] | None = None
    """Blocks of the index and of this worker when one found no room; None if all did. No more are
    taken before the next snapshot, which keeps what is known closed under prefixes."""

    @property
    def is_full(self) -> bool:
        return self.refused_at is not None


class PrefixIndex:
    """The blocks of every worker of one pool."""

    def __init__(
        self,
        blocks_max: int = INDEXED_BLOCKS_MAX,
        blocks_per_worker_max: int = INDEXED_BLOCKS_PER_WORKER_MAX,
        on_expected: Callable[[WorkerId, NDArray[np.uint64]], None] = lambda *_: None,
    ) -> None:
        """`on_expected` is told of the prompts that workers accept: the hashes of their blocks."""
        self.counts = EventCounts()
        self._on_expected = on_expected
        self._table = HolderTable(blocks_max)
        self._workers: dict[WorkerId, _WorkerBlocks] = {}
        self._numbers: set[int] = set()
        """In use."""
        self._known_bits = 0
        self._known = np.zeros(1, dtype=np.uint64)
        """The same bits as the table wants them."""
        self._blocks_per_worker_max = blocks_per_worker_max

    # --- membership -------------------------------------------------------------------------

    def join(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        """Believe this incarnation of a worker from now on, and no other one."""
        self.leave(worker_id)
        number = next(n for n in range(len(self._numbers) + 1) if n not in self._numbers)
        self._table.reserve(number)
        self._know(self._known_bits)
        self._numbers.add(number)
        self._workers[worker_id] = _WorkerBlocks(number, incarnation)

    def leave(self, worker_id: WorkerId) -> None:
        """Forget a worker that is dead, or that gets no requests any more."""
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            self._forget(worker)
            self._numbers.remove(worker.number)

    def lose(self, worker_id: WorkerId) -> None:
        """Nothing is known of a worker before its next snapshot."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            self._forget(worker)

    # --- events -----------------------------------------------------------------------------

    def apply(self, batch: KvEventBatch) -> None:
        """Take a batch of a worker, as the table above says. Raises `EventGap`."""
        for _ in self.steps(batch):
            pass

    def steps(self, batch: KvEventBatch) -> Iterator[None]:
        """`apply` in steps of bounded length, for whoever has something else to do in between.

        Between them less is known than is true. Raises `EventGap`.
        """
        worker = self._workers.get(batch.worker_id)
        if worker is None or worker.incarnation != batch.incarnation:
            self.counts.stale += 1
            return
        if not self._is_due(worker, batch):
            return
        worker.sequence = batch.sequence
        if batch.snapshot:
            self._forget(worker)
            worker.is_known = True
            self._know(self._known_bits | 1 << worker.number)
        for applied in self._apply_all(worker, batch):
            if applied < INDEXED_BLOCKS_APPLIED_AT_ONCE:
                continue
            yield
            if self._workers.get(batch.worker_id) is not worker:
                return
        if self._has_room_again(worker):
            raise self._gap(worker, f"{batch.worker_id}: there is room for what was left out")

    def _is_due(self, worker: _WorkerBlocks, batch: KvEventBatch) -> bool:
        """Whether the events of a batch are to be applied. Raises `EventGap`."""
        counts, sequence = self.counts, batch.sequence
        if batch.snapshot:
            is_due = sequence >= worker.sequence
            counts.snapshots += is_due
            counts.repeated += not is_due
            return is_due
        is_mark = not batch.events
        if not worker.is_known or sequence > worker.sequence + (not is_mark):
            known = f"after {worker.sequence}" if worker.is_known else "before any snapshot"
            worker.sequence = max(worker.sequence, sequence)
            raise self._gap(worker, f"{batch.worker_id}: batch {sequence} {known}")
        is_new = is_mark or sequence > worker.sequence
        counts.marks += is_mark
        counts.changes += is_new and not is_mark
        counts.repeated += not is_new
        return is_new

    def _apply_all(self, worker: _WorkerBlocks, batch: KvEventBatch) -> Iterator[int]:
        """Yields the number of blocks applied since it did so last."""
        for event in batch.events:
            yield from self._apply_event(worker, event)
        for digests in batch.expected:
            hashes = np.frombuffer(digests, dtype="<u8")
            self._on_expected(batch.worker_id, hashes)
            self.counts.expected += 1
            yield hashes.size

    def _apply_event(self, worker: _WorkerBlocks, event: KvEvent) -> Iterator[int]:
        """As `_apply_all`."""
        match event:
            case BlocksStored(hashes):
                for part in _parts_of(hashes):
                    self._store(worker, part)
                    yield len(part)
            case BlocksRemoved(hashes):
                for part in _parts_of(hashes):
                    worker.count -= self._table.discard(_array_of(part), worker.number)
                    yield len(part)
            case AllBlocksCleared():
                self._clear(worker)

    def _store(self, worker: _WorkerBlocks, blocks: Sequence[BlockHash]) -> None:
        if worker.is_full:
            return
        room = self._blocks_per_worker_max - worker.count
        added, is_all = self._table.add(_array_of(blocks), worker.number, room)
        worker.count += added
        if not is_all:
            worker.refused_at = len(self._table), worker.count
            self.counts.left_out += 1

    def _has_room_again(self, worker: _WorkerBlocks) -> bool:
        """Whether so much went since blocks were left out that it is worth asking for them."""
        if worker.refused_at is None:
            return False
        in_index, of_worker = worker.refused_at
        return 4 * len(self._table) < 3 * in_index or 4 * worker.count < 3 * of_worker

    def _gap(self, worker: _WorkerBlocks, text: str) -> EventGap:
        self._forget(worker)
        self.counts.gaps += 1
        return EventGap(text)

    def _forget(self, worker: _WorkerBlocks) -> None:
        self._clear(worker)
        worker.is_known = False
        self._know(self._known_bits & ~(1 << worker.number))

    def _know(self, bits: int) -> None:
        """From now on the blocks of these workers are known."""
        self._known_bits = bits
        self._known = np.frombuffer(bits.to_bytes(self._table.holders_max // 8, "little"), "<u8")

    def _clear(self, worker: _WorkerBlocks) -> None:
        if worker.count:
            self._table.forget(worker.number)
        worker.count = 0
        worker.refused_at = None

    # --- questions --------------------------------------------------------------------------

    def numbers_of(self, worker_ids: Iterable[WorkerId]) -> NDArray[np.intp]:
        """Where the index has each worker, until one of them joins or leaves; of one that is not in
        it, a number that it has nobody at."""
        workers = self._workers
        numbers = [workers[name].number if name in workers else _NOBODY for name in worker_ids]
        return np.array(numbers, dtype=np.intp)

    def hits(
        self, prompt: Sequence[BlockHash] | NDArray[np.uint64], numbers: NDArray[np.intp]
    ) -> NDArray[np.int64]:
        """How many leading blocks of a prompt the workers of these numbers hold."""
        found = np.zeros(numbers.size, dtype=np.int64)
        self.note_hits(prompt, numbers, 1, found)
        return found

    def note_hits(
        self,
        prompt: Sequence[BlockHash] | NDArray[np.uint64],
        numbers: NDArray[np.intp],
        step: int,
        found: NDArray[np.int64],
    ) -> None:
        """Write into `found` `step` for each leading block of a prompt that the workers of these
        numbers hold. What it has in place of workers that are not in the index stays."""
        self._table.note_hits(_array_of(prompt), self._known, numbers, step, found)

    def hit_blocks(self, worker_id: WorkerId, prompt: Sequence[BlockHash]) -> int:
        """How many leading blocks of `prompt` one worker holds."""
        return int(self.hits(prompt, self.numbers_of((worker_id,)))[0])

    def worker(self, worker_id: WorkerId) -> IndexedWorker:
        """What is known of one worker."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return IndexedWorker(0, known_to=None, is_full=False)
        known_to = worker.sequence if worker.is_known else None
        return IndexedWorker(worker.count, known_to, worker.is_full)

    def report(self) -> IndexReport:
        """How the index is doing."""
        return IndexReport(
            workers=len(self._workers),
            known_workers=self._known_bits.bit_count(),
            blocks=len(self._table),
            nbytes=self._table.nbytes,
            nbytes_max=self._table.nbytes_max,
            counts=replace(self.counts),
        )

    def blocks(self, worker_id: WorkerId) -> frozenset[int]:
        """All blocks known of one worker. Looks at the whole index."""
        worker = self._workers.get(worker_id)
        return frozenset() if worker is None else frozenset(self._table.blocks_of(worker.number))


def _parts_of(hashes: Sequence[BlockHash]) -> Iterator[Sequence[BlockHash]]:
    step = INDEXED_BLOCKS_APPLIED_AT_ONCE
    return (hashes[start : start + step] for start in range(0, len(hashes), step))


def _array_of(hashes: Sequence[BlockHash] | NDArray[np.uint64]) -> NDArray[np.uint64]:
    return np.asarray(hashes, dtype=np.uint64)
