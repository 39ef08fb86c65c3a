"""When Python's garbage collector looks at everything: between requests, not in a step.

A full collection visits every container of the process, and each node of the prefix index is one:
it takes about a second per million nodes, and Python starts it whenever the index has grown by a
quarter. Almost nothing that a worker makes needs it: evicted nodes and ended requests are freed as
soon as the last reference goes. Only cycles wait for it, which exceptions and tasks leave behind.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from kvferry.limits import FULL_COLLECTION_IDLE_S, FULL_COLLECTION_INTERVAL_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvferry.clock import Clock
    from kvferry.errors import KvferryError

_NEVER = 2**31 - 1
"""Collections of the middle generation before Python starts a full one by itself."""


class GarbageCollections:
    """A `LoopPart` that decides about full collections from its start to its `stop`.

    What there is at the start, the model's modules above all, is never looked at again. Then a
    full collection runs when `is_idle`, `FULL_COLLECTION_IDLE_S` after the last one, and on a busy
    worker after `FULL_COLLECTION_INTERVAL_S`. Young objects are collected as Python likes.
    """

    def __init__(self, clock: Clock, is_idle: Callable[[], bool]) -> None:
        self._clock = clock
        self._is_idle = is_idle
        self._thresholds = gc.get_threshold()
        self._collected_at = clock.now()
        gc.collect()
        gc.freeze()
        gc.set_threshold(*self._thresholds[:2], _NEVER)

    def handle(self, event: object) -> bool:
        """No event is meant for it."""
        return False

    def tick(self) -> None:
        """Collect if it is time."""
        now = self._clock.now()
        interval = FULL_COLLECTION_IDLE_S if self._is_idle() else FULL_COLLECTION_INTERVAL_S
        if now >= self._collected_at + interval:
            gc.collect()
            self._collected_at = self._clock.now()

    def next_deadline(self) -> float | None:
        """None: nobody waits for it, and `tick` is called often enough."""
        return None

    def flush(self) -> None:
        """Nothing to send."""

    def stop(self, error: KvferryError) -> None:
        """Leave it to Python again."""
        gc.set_threshold(*self._thresholds)
        gc.unfreeze()
