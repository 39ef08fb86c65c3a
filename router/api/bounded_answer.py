"""An answer that ends in bounded time, however slowly its client reads."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Protocol

from kvferry.errors import DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from kvferry.config import ClusterConfig
    from router.request import ClientRequest, ResponseChunk

_WRITE_GRACE_S = 1.0
"""The router's own deadline comes first, with its better message."""


class Answers(Protocol):
    """A router, or what counts the requests to one."""

    config: ClusterConfig

    def generate(self, request: ClientRequest) -> AsyncGenerator[ResponseChunk, None]:
        """As `Router.generate`."""
        ...


@contextlib.asynccontextmanager
async def bounded_answer(
    router: Answers, request: ClientRequest
) -> AsyncIterator[AsyncGenerator[ResponseChunk, None]]:
    """The chunks of `router.generate`, closed at the end.

    Bounded also while a client that does not read holds up a write within the body, which the
    router's own deadline cannot see. Raises `KvferryError`.
    """
    longest_s = router.config.router.request_timeout_s + _WRITE_GRACE_S
    try:
        async with (
            asyncio.timeout(longest_s),
            contextlib.aclosing(router.generate(request)) as chunks,
        ):
            yield chunks
    except TimeoutError as error:
        raise DeadlineExceeded(f"the answer was not read within {longest_s:g} s") from error
