"""The two directions of a conversation, as coroutines that begin and end together."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Coroutine


class MessageStream(Protocol):
    """Either end of a bidirectional gRPC stream."""

    async def read(self) -> Any:
        """The next message, or `grpc.aio.EOF`."""
        ...

    async def write(self, message: Any) -> None:
        """Send, waiting for flow control. Not to be called twice at once."""
        ...


async def run_until_one_ends(*sides: Coroutine[Any, Any, None]) -> None:
    """Run all at once. When one ends, cancel and await the others, and raise what it raised."""
    tasks = [asyncio.ensure_future(side) for side in sides]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if task in done:
            task.result()
