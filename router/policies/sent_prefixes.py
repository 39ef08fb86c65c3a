"""Which prefixes were sent to which worker: what a router knows without any event."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from router.policies.pool import Prompt

_WORKERS_MAX = 1024
"""Of workers that left the least recently used are forgotten."""


@dataclass(slots=True, eq=False)
class _Sent:
    """Prefixes sent to one worker, with the time of the last sending.

    In two generations: when the younger one is full it becomes the older one, whose prefixes are
    forgotten. A prompt enters with all its prefixes, so each generation has with a prefix all
    shorter ones, sent no earlier.
    """

    young: dict[int, float] = field(default_factory=dict)
    old: dict[int, float] = field(default_factory=dict)
    last: float = float("-inf")

    def has(self, key: int, since: float) -> bool:
        """Whether a prefix was sent at or after `since`."""
        at = self.young.get(key)
        if at is None:
            at = self.old.get(key)
        return at is not None and at >= since


class SentPrefixes:
    """Prefixes by worker, within a bound; those sent least recently are forgotten."""

    def __init__(self, prefixes_per_worker_max: int) -> None:
        """A single prompt may exceed the bound for as long as it is the last one."""
        self._young_max = prefixes_per_worker_max // 2
        self._workers: OrderedDict[int, _Sent] = OrderedDict()

    def add(self, worker: int, prompt: Prompt, now: float) -> None:
        """A prompt was sent."""
        sent = self._workers.get(worker)
        if sent is None:
            sent = self._workers[worker] = _Sent()
            if len(self._workers) > _WORKERS_MAX:
                self._workers.popitem(last=False)
        self._workers.move_to_end(worker)
        if len(sent.young) + prompt.keys.size > self._young_max:
            sent.old, sent.young = sent.young, {}
        sent.young.update(dict.fromkeys(prompt.keys.tolist(), now))
        sent.last = now

    def tokens(
        self, workers: Sequence[int], prompt: Prompt, since: Sequence[float]
    ) -> NDArray[np.int64]:
        """Leading tokens of `prompt` that each worker was sent at or after its `since`."""
        keys = prompt.keys.tolist()
        found = np.zeros(len(workers), dtype=np.int64)
        for position, (worker, time) in enumerate(zip(workers, since, strict=True)):
            sent = self._workers.get(worker)
            if sent is not None and sent.last >= time and keys and sent.has(keys[0], time):
                found[position] = prompt.ends[_last_sent(sent, keys, time)]
        return found


def _last_sent(sent: _Sent, keys: list[int], since: float) -> int:
    """Position of the longest prefix sent; the first one was."""
    low, high = 1, len(keys)
    while low < high:
        middle = (low + high) // 2
        if sent.has(keys[middle], since):
            low = middle + 1
        else:
            high = middle
    return low - 1
