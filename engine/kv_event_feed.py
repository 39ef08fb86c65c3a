"""Tells subscribers what the radix cache holds: a snapshot first, then every change.

In between come marks, which let a reader notice that it missed the last change, or that it hears
nothing any more. Where several listen, they are also told which prompts were accepted, before
these are computed: the one that sent a prompt knows of it, the others would have it computed
elsewhere. That is no change and has no number, and no end of it is told
(`docs/decisions/0034-prompts-told-when-accepted.md`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from engine.request import Stage
from kvferry.cache_key import Sharing
from kvferry.kv_events import (
    BLOCK_DIGEST_BYTES,
    BlocksRemoved,
    BlocksStored,
    KvEvent,
    KvEventBatch,
)
from kvferry.limits import KV_EVENTS_BUFFERED_MAX, KV_EVENTS_MARK_INTERVAL_S

if TYPE_CHECKING:
    from engine.request import Request
    from kvferry.clock import Clock
    from kvferry.errors import KvferryError
    from kvferry.ids import Incarnation, WorkerId
    from mem_cache.kv_cache import KVCache


class KvSubscriber(Protocol):
    """Where the batches of one subscription go. Called on the engine thread."""

    def deliver(self, batch: KvEventBatch) -> None:
        """Take the next batch; must not block."""
        ...

    def backlog_blocks(self) -> int:
        """Blocks told of and not yet taken by the reader."""
        ...

    def is_caught_up(self) -> bool:
        """Whether the reader has taken every batch, snapshots too."""
        ...

    def end(self) -> None:
        """No batch will follow."""
        ...


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Event: begin a subscription with a snapshot."""

    subscriber: KvSubscriber


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """Event: the reader is gone."""

    subscriber: KvSubscriber


class KvEventFeed:
    """Publishes the KV events of one worker. A `LoopPart` of the engine thread.

    Changes are numbered whether or not somebody subscribes, so that every reader sees the same
    numbers. A reader that falls behind by more than `KV_EVENTS_BUFFERED_MAX` blocks misses changes
    and gets a new snapshot once it has taken everything else. So at most one snapshot and that many
    changes wait for a reader, however slow it is, and it still converges.
    """

    def __init__(
        self, kv_cache: KVCache, worker_id: WorkerId, incarnation: Incarnation, clock: Clock
    ) -> None:
        self._kv_cache = kv_cache
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._clock = clock
        self._sequence = 0
        """Of the last changes."""
        # In the order in which they came, so that equal histories go alike.
        self._subscribers: dict[KvSubscriber, None] = {}
        self._behind: set[KvSubscriber] = set()
        self._accepted: list[Request] = []
        """Since they were last told of."""
        self._mark_due = clock.now()

    def accepted(self, request: Request) -> None:
        """What is known of this request will be computed here."""
        self._accepted.append(request)

    def handle(self, event: object) -> bool:
        """Takes `Subscribe` and `Unsubscribe`."""
        match event:
            case Subscribe(subscriber):
                self._publish_changes()
                self._subscribers[subscriber] = None
                self._send_snapshot(subscriber)
            case Unsubscribe(subscriber):
                self._subscribers.pop(subscriber, None)
                self._behind.discard(subscriber)
            case _:
                return False
        return True

    def tick(self) -> None:
        """Send a mark when it is time for one."""
        now = self._clock.now()
        if now < self._mark_due:
            return
        self._mark_due = now + KV_EVENTS_MARK_INTERVAL_S
        self._publish_changes()
        for subscriber in self._subscribers:
            if subscriber not in self._behind and subscriber.is_caught_up():
                # Whoever has something to read needs no sign of life.
                self._send(subscriber, (), ())

    def next_deadline(self) -> float | None:
        """The time of the next mark, if somebody listens."""
        return self._mark_due if self._subscribers else None

    def flush(self) -> None:
        """Publish what the cache stored and removed, and what was accepted, since the last call."""
        self._publish_changes()

    def stop(self, error: KvferryError) -> None:
        """End all subscriptions."""
        for subscriber in self._subscribers:
            subscriber.end()
        self._subscribers.clear()
        self._behind.clear()

    def _publish_changes(self) -> None:
        events, expected = tuple(self._kv_cache.take_events()), self._take_expected()
        self._sequence += bool(events)
        for subscriber in self._subscribers:
            if subscriber in self._behind:
                if subscriber.is_caught_up():
                    self._behind.discard(subscriber)
                    self._send_snapshot(subscriber)
            elif not events and not expected:
                continue
            elif subscriber.backlog_blocks() > KV_EVENTS_BUFFERED_MAX:
                self._behind.add(subscriber)
            else:
                self._send(subscriber, events, expected)

    def _take_expected(self) -> tuple[bytes, ...]:
        """Of each accepted prompt that brings something new: its digests."""
        accepted, self._accepted = self._accepted, []
        if len(self._subscribers) < 2:
            # The only one that listens sent them itself.
            return ()
        tree = self._kv_cache.tree
        found = (
            tree.digests_to_come(request.known, request.cache_use.extra_key)
            for request in accepted
            if request.stage is not Stage.ENDED and request.cache_use.sharing is not Sharing.PRIVATE
        )
        return tuple(dict.fromkeys(filter(None, found)))

    def _send_snapshot(self, subscriber: KvSubscriber) -> None:
        held = BlocksStored(self._kv_cache.snapshot_blocks())
        self._send(subscriber, (held,), (), snapshot=True)

    def _send(
        self,
        subscriber: KvSubscriber,
        events: tuple[KvEvent, ...],
        expected: tuple[bytes, ...],
        *,
        snapshot: bool = False,
    ) -> None:
        worker = self._worker_id, self._incarnation
        subscriber.deliver(KvEventBatch(*worker, self._sequence, snapshot, events, expected))


def blocks_in(batch: KvEventBatch) -> int:
    """Blocks a batch tells of, changed or expected: what counts as backlog.

    A snapshot does not count. It may be larger than the bound, and a reader that is given one
    because it was behind must not be behind again by it.
    """
    if batch.snapshot:
        return 0
    changed = sum(
        len(event.block_hashes)
        for event in batch.events
        if isinstance(event, BlocksStored | BlocksRemoved)
    )
    return changed + sum(map(len, batch.expected)) // BLOCK_DIGEST_BYTES
