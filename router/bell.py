"""Wakes all who listen at that moment."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.errors import KvferryError


class Bell:
    """Rung when something changed. Unlike an event it stays in no state: who listens later waits
    for the next time."""

    def __init__(self) -> None:
        self._listeners: set[Listener] = set()

    def ring(self) -> None:
        """Wake them."""
        for listener in self._listeners:
            listener.wake()

    def listen(self) -> Listener:
        """From now on, until its wait is over."""
        return Listener(self._listeners)


class Listener:
    """One wait for one ring, which can be aborted."""

    def __init__(self, listeners: set[Listener]) -> None:
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._listeners = listeners
        listeners.add(self)

    async def wait(self, longest_s: float) -> None:
        """Returns with the ring, after `longest_s` seconds without one. Raises what it was aborted
        with."""
        try:
            await asyncio.wait({self._over}, timeout=longest_s)
            if self._over.done():
                self._over.result()
        finally:
            self._listeners.discard(self)
            self._over.cancel()

    def wake(self) -> None:
        """The bell has rung."""
        if not self._over.done():
            self._over.set_result(None)

    def abort(self, error: KvferryError) -> None:
        """Have the wait raise `error`, if it is not over."""
        if not self._over.done():
            self._over.set_exception(error)
