"""A bidirectional gRPC stream in memory."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio


class MessagePipe:
    """One end: `MessageStream`. What is written goes to `written`, what is read comes from `feed`.

    Attributes:
        flows: cleared, every write waits, as for a peer that does not read.
    """

    def __init__(self) -> None:
        self.written: list[Any] = []
        self.flows = asyncio.Event()
        self.flows.set()
        self.is_cancelled = False
        self._incoming: asyncio.Queue[Any] = asyncio.Queue()

    def feed(self, item: Any) -> None:
        """A message, or an exception for `read` to raise."""
        self._incoming.put_nowait(item)

    def end(self) -> None:
        self.feed(grpc.aio.EOF)

    async def read(self) -> Any:
        item = await self._incoming.get()
        if isinstance(item, BaseException):
            raise item
        return item

    async def write(self, message: Any) -> None:
        await self.flows.wait()
        self.written.append(message)

    def cancel(self) -> None:
        """As a client's call does: whoever reads is cancelled, and not by his own task."""
        if not self.is_cancelled:
            self.is_cancelled = True
            self.feed(asyncio.CancelledError())
