"""One thing at a time, in the order of `router.fair_queue`: classes by weight, tenants alike.

A turn costs the time it takes, in whole milliseconds and at least one, and at first what is usual.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.limits import TENANTS_REMEMBERED_MAX
from router.fair_queue import FairQueue
from router.request import ServiceClass
from router.work import Work

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from kvferry.clock import Clock

_USUAL = Work(prompt_tokens=10)
"""The queue counts in tokens; here these are milliseconds."""


@dataclass(slots=True, eq=False)
class _Turn:
    service_class: ServiceClass
    tenant: str
    begins: asyncio.Future[None]
    has_begun: bool = False


class Turns:
    """On one event loop."""

    def __init__(self, weights: Mapping[ServiceClass, float], clock: Clock) -> None:
        self._weights = weights
        self._clock = clock
        self._queue: FairQueue[_Turn] = FairQueue(weights)
        self._tenants: set[str] = set()
        """Those that the queue knows."""
        self._is_taken = False

    @contextlib.asynccontextmanager
    async def turn(self, service_class: ServiceClass, tenant: str) -> AsyncIterator[None]:
        """Nobody else is inside. Whoever is cancelled while it waits has lost its place."""
        turn = _Turn(service_class, tenant, asyncio.get_running_loop().create_future())
        self._queue.push(turn, service_class, tenant, _USUAL)
        self._tenants.add(tenant)
        self._begin_next()
        took_ms = 0
        try:
            await turn.begins
            since = self._clock.now()
            try:
                yield
            finally:
                # Free turns would leave everybody as far as before: who has many would have all.
                took_ms = max(1, round(1000 * (self._clock.now() - since)))
        finally:
            self._leave(turn, took_ms)

    def _leave(self, turn: _Turn, took_ms: int) -> None:
        if turn.has_begun:
            self._queue.settle(turn.service_class, turn.tenant, took_ms - _USUAL.tokens)
            self._is_taken = False
            self._begin_next()
        else:
            self._queue.remove(turn, turn.service_class, turn.tenant)
        self._forget_idle()

    def _begin_next(self) -> None:
        turn = None if self._is_taken else self._queue.head(lambda _: True)
        if turn is not None:
            self._queue.serve(turn, turn.service_class, turn.tenant)
            self._is_taken = turn.has_begun = True
            if not turn.begins.done():
                turn.begins.set_result(None)  # If it is, its task is being cancelled, and leaves.

    def _forget_idle(self) -> None:
        """What somebody had matters to those that wait."""
        if not self._is_taken and len(self._queue) == 0:
            self._queue = FairQueue(self._weights)
            self._tenants.clear()
        elif len(self._tenants) > TENANTS_REMEMBERED_MAX:
            idle = {name for name in self._tenants if not self._waits(name)}
            for name in idle:
                self._queue.forget(name)
            self._tenants -= idle

    def _waits(self, tenant: str) -> bool:
        return any(self._queue.count_of(each, tenant) for each in ServiceClass)
