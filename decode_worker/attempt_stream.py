"""From the engine thread to one gRPC call: outputs in order, then exactly one end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvferry.errors import KvferryError, WorkerUnavailable
from kvferry.limits import WRITER_CHECK_INTERVAL_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from kvferry.generation import AttemptOutput


class AttemptStream:
    """One attempt's outputs. Written through an `Outbox`, read on the event loop.

    Not bounded by itself: a sample has at most `max_tokens` outputs with tokens.
    """

    def __init__(self, samples: int = 1) -> None:
        self._samples_left = samples
        self._queue: asyncio.Queue[AttemptOutput | KvferryError] = asyncio.Queue()

    async def outputs(self, is_alive: Callable[[], bool]) -> AsyncIterator[AttemptOutput]:
        """Outputs up to and with the `finish` of the last sample. Raises the error that ended it.

        `is_alive` tells whether somebody still writes; once it is False and nothing is left to
        read, `WorkerUnavailable` is raised.
        """
        while True:
            try:
                item = await asyncio.wait_for(self._queue.get(), WRITER_CHECK_INTERVAL_S)
            except TimeoutError:
                if is_alive():
                    continue
                raise WorkerUnavailable("the engine has stopped") from None
            if isinstance(item, KvferryError):
                raise item
            yield item
            self._samples_left -= item.finish is not None
            if self._samples_left == 0:
                return

    def deliver(self, item: AttemptOutput | KvferryError) -> None:
        """Make `item` readable. On the event loop."""
        self._queue.put_nowait(item)


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
