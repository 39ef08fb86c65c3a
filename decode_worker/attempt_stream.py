"""From the engine thread to the event loop: what attempts say, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio

    from kvferry.errors import KvferryError
    from kvferry.generation import AttemptOutput


class AttemptStream(Protocol):
    """Where one attempt's outputs go: in order, then exactly one end.

    The end is an error, or the output with which the last of its samples finishes.
    """

    def deliver(self, item: AttemptOutput | KvferryError) -> None:
        """Take the next one. On the event loop."""
        ...


class Outbox:
    """Collects what one turn of the engine says, and wakes the event loop once for all of it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: list[tuple[AttemptStream, AttemptOutput | KvferryError]] = []

    def put(self, stream: AttemptStream, item: AttemptOutput | KvferryError) -> None:
        """Queue `item` for the next `flush`. On the engine thread."""
        self._items.append((stream, item))

    def flush(self) -> None:
        """Send everything queued to the event loop. On the engine thread."""
        if self._items and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_deliver, self._items)
        self._items = []


def _deliver(items: list[tuple[AttemptStream, AttemptOutput | KvferryError]]) -> None:
    for stream, item in items:
        stream.deliver(item)
