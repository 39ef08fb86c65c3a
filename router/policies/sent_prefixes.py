"""Which prefixes were sent to which worker: what a router knows without any event."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from router.policies.pool import Prompt

_WORKERS_MAX = 1024
"""Of workers that left the least recently used are forgotten."""


class SentPrefixes:
    """Prefixes by worker, the least recently sent forgotten first, longer ones before shorter."""

    def __init__(self, prefixes_per_worker_max: int) -> None:
        self._max = prefixes_per_worker_max
        self._workers: OrderedDict[int, OrderedDict[int, float]] = OrderedDict()

    def add(self, worker: int, prompt: Prompt, now: float) -> None:
        """A prompt was sent."""
        sent = self._workers.setdefault(worker, OrderedDict())
        self._workers.move_to_end(worker)
        if len(self._workers) > _WORKERS_MAX:
            self._workers.popitem(last=False)
        # Longest first: then a prefix is never older than one that it begins.
        for key in prompt.keys[::-1].tolist():
            sent[key] = now
            sent.move_to_end(key)
        while len(sent) > self._max:
            sent.popitem(last=False)

    def tokens(
        self, workers: Sequence[int], prompt: Prompt, since: Sequence[float] | float
    ) -> NDArray[np.int64]:
        """Leading tokens of `prompt` that each worker was sent at or after `since`.

        A worker that was sent a prefix was sent all shorter ones, and not before it: hence by
        bisection.
        """
        keys = prompt.keys.tolist()
        times = [since] * len(workers) if isinstance(since, float) else since
        return np.array(
            [
                self._tokens_of(worker, keys, prompt, time)
                for worker, time in zip(workers, times, strict=True)
            ],
            dtype=np.int64,
        )

    def _tokens_of(self, worker: int, keys: list[int], prompt: Prompt, since: float) -> int:
        sent = self._workers.get(worker)
        if sent is None or not keys:
            return 0
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            at = sent.get(keys[middle])
            if at is not None and at >= since:
                low = middle + 1
            else:
                high = middle
        return int(prompt.ends[low - 1]) if low else 0
