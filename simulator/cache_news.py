"""KV events on their way from workers to routers: late, and some of them lost."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from kvferry.ids import ExtraKey
from kvferry.kv_events import BlocksStored, KvEventBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvferry.ids import WorkerId
    from kvferry.kv_events import KvEvent
    from simulator.event_queue import EventQueue
    from simulator.held_request import HeldRequest
    from simulator.settings import SimSettings
    from simulator.sim_router import SimRouter
    from simulator.worker import SimWorker

_SHARED = ExtraKey("")


class CacheNews:
    """As `engine.kv_event_feed` sends them: numbered changes, marks, and snapshots on demand."""

    def __init__(self, settings: SimSettings, queue: EventQueue) -> None:
        self.routers: Sequence[SimRouter] = ()
        """Who listens."""
        self.batches = 0
        self.lost = 0
        self.snapshots = 0
        self._delay_s = settings.event_delay_s
        self._loss = settings.event_loss
        self._queue = queue
        self._sequences: dict[SimWorker, int] = {}
        self._repairing: set[tuple[int, WorkerId]] = set()
        self._rng = random.Random(f"{settings.seed}/events")

    def changed(self, worker: SimWorker, events: Sequence[KvEvent]) -> None:
        """The radix tree holds other blocks than before."""
        self._sequences[worker] = self._sequences.get(worker, 0) + 1
        self.batches += 1
        self._publish(self._batch(worker, tuple(events)))

    def accepted(self, worker: SimWorker, request: HeldRequest) -> None:
        """It will compute what is known of a request: the other routers are told, if there are."""
        if len(self.routers) < 2:
            return
        ids = request.ids[: request.known // worker.kv.page_tokens]
        digests = worker.kv.cache.tree.digests_to_come(ids, _SHARED)
        if digests:
            self._publish(self._batch(worker, (), expected=(digests,)))

    def mark(self, worker: SimWorker) -> None:
        """A sign of life, by which a reader notices that it missed the last changes."""
        if self._loss:
            self._publish(self._batch(worker, ()))

    def repair(self, router: SimRouter, worker: SimWorker) -> None:
        """A router missed something: it asks for a snapshot, which comes after a way each."""
        key = router.number, worker.info.worker_id
        if key not in self._repairing:
            self._repairing.add(key)
            self._queue.after(self._delay_s, self._repair, router, worker)

    def snapshot(self, router: SimRouter, worker: SimWorker, delay_s: float) -> None:
        """All that a worker holds now."""
        self.snapshots += 1
        held = (BlocksStored(worker.kv.cache.snapshot_blocks()),)
        router.hear(self._batch(worker, held, snapshot=True), self._queue.time + delay_s)

    def _repair(self, router: SimRouter, worker: SimWorker) -> None:
        self._repairing.discard((router.number, worker.info.worker_id))
        if not worker.is_dead:
            self.snapshot(router, worker, self._delay_s)

    def _publish(self, batch: KvEventBatch) -> None:
        for router in self.routers:
            if self._loss and self._rng.random() < self._loss:
                self.lost += 1
            else:
                router.hear(batch, self._queue.time + self._delay_s)

    def _batch(
        self,
        worker: SimWorker,
        events: tuple[KvEvent, ...],
        *,
        snapshot: bool = False,
        expected: tuple[bytes, ...] = (),
    ) -> KvEventBatch:
        sequence = self._sequences.get(worker, 0)
        who = worker.info.worker_id, worker.info.incarnation
        return KvEventBatch(*who, sequence, snapshot, events, expected)
