"""Which prefixes were sent to which worker: what a router knows that takes no events."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from router.policies.pool import Prompt

_WORKERS_MAX = 1024
"""Of workers that left the least recently used are forgotten."""


@dataclass(slots=True, eq=False)
class _Sent:
    """Prefixes sent to one worker.

    In two generations: when the younger one is full it becomes the older one, whose prefixes are
    forgotten. A prompt enters with all its prefixes, so each generation has with a prefix all
    shorter ones.
    """

    young: set[int] = field(default_factory=set)
    old: set[int] = field(default_factory=set)

    def has(self, key: int) -> bool:
        """Whether a prefix was sent."""
        return key in self.young or key in self.old


class SentPrefixes:
    """Prefixes by worker, within a bound; those sent least recently are forgotten."""

    def __init__(self, prefixes_per_worker_max: int) -> None:
        """A single prompt may exceed the bound for as long as it is the last one."""
        self._young_max = prefixes_per_worker_max // 2
        self._workers: OrderedDict[int, _Sent] = OrderedDict()

    def add(self, worker: int, prompt: Prompt) -> None:
        """A prompt was sent."""
        sent = self._workers.get(worker)
        if sent is None:
            sent = self._workers[worker] = _Sent()
            if len(self._workers) > _WORKERS_MAX:
                self._workers.popitem(last=False)
        self._workers.move_to_end(worker)
        if len(sent.young) + prompt.keys.size > self._young_max:
            sent.old, sent.young = sent.young, set()
        sent.young.update(prompt.keys.tolist())

    def tokens(self, workers: Iterable[int], prompt: Prompt) -> NDArray[np.int64]:
        """Leading tokens of `prompt` that each worker was sent."""
        keys = prompt.keys.tolist()
        lengths = [0, *prompt.ends.tolist()]
        return np.array([lengths[self._count(each, keys)] for each in workers], dtype=np.int64)

    def _count(self, worker: int, keys: list[int]) -> int:
        """How many of the prefixes, by bisection."""
        sent = self._workers.get(worker)
        low, high = 0, len(keys) if sent is not None else 0
        while low < high and sent is not None:
            middle = (low + high) // 2
            if sent.has(keys[middle]):
                low = middle + 1
            else:
                high = middle
        return low
