"""The answers to the prompts of one call, as one stream of what is ready."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from kvferry.errors import KvferryError, RequestCancelled
from kvferry.generation import FinishReason
from kvferry.rpc_errors import is_task_cancelled

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

    from router.request import ClientRequest, ResponseChunk

    Generate: TypeAlias = Callable[[ClientRequest], AsyncGenerator[ResponseChunk, None]]

_READY_MAX = 64
"""Chunks that may wait for a client that reads slowly; then its workers' streams wait."""


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """What is new of one sample of one prompt."""

    prompt: int
    chunk: ResponseChunk


class PromptFailed(Exception):
    """Ends all answers of a call."""

    def __init__(self, prompt: int, error: KvferryError) -> None:
        super().__init__(str(error))
        self.prompt = prompt
        self.error = error


_Item: TypeAlias = "PromptChunk | Exception | None"
"""None: one prompt is done."""


@contextlib.asynccontextmanager
async def answer_streams(
    generate: Generate, requests: Sequence[ClientRequest]
) -> AsyncIterator[AsyncGenerator[list[PromptChunk], None]]:
    """Lists of all chunks that are ready, those of one sample joined, until all answers ended.

    Raises `PromptFailed` with the first error. Whatever still runs at the end of the context is
    ended.
    """
    ready: asyncio.Queue[_Item] = asyncio.Queue(_READY_MAX)
    tasks = [
        asyncio.create_task(_pump(generate, request, number, ready))
        for number, request in enumerate(requests)
    ]
    try:
        yield _batches(ready, len(tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    generate: Generate, request: ClientRequest, number: int, ready: asyncio.Queue[_Item]
) -> None:
    """Outermost frame of a task: whatever it meets is told to who reads."""
    try:
        async with contextlib.aclosing(generate(request)) as chunks:
            async for chunk in chunks:
                if chunk.finish is not None and chunk.finish.reason is FinishReason.CANCELLED:
                    # OpenAI's API has no end of this kind.
                    raise RequestCancelled(f"request {chunk.request_id} was cancelled")
                await ready.put(PromptChunk(number, chunk))
        await ready.put(None)
    except asyncio.CancelledError as error:
        if is_task_cancelled():
            raise
        # Of something that was waited for: without a word of it the reader would wait for ever.
        await ready.put(RuntimeError(f"ended by a cancellation not its own: {error!r}"))
    except KvferryError as error:
        await ready.put(PromptFailed(number, error))
    except Exception as error:  # noqa: BLE001 - raised again where the answers are read
        await ready.put(error)


async def _batches(
    ready: asyncio.Queue[_Item], running: int
) -> AsyncGenerator[list[PromptChunk], None]:
    while running:
        items = [await ready.get()]
        while not ready.empty():
            items.append(ready.get_nowait())
        chunks = []
        for item in items:
            match item:
                case None:
                    running -= 1
                case PromptChunk():
                    chunks.append(item)
                case _:
                    if chunks:
                        yield join_chunks(chunks)
                    raise item
        if chunks:
            yield join_chunks(chunks)


def join_chunks(chunks: Sequence[PromptChunk]) -> list[PromptChunk]:
    """One chunk per sample, in the order of their first ones."""
    joined: dict[tuple[int, int], ResponseChunk] = {}
    for entry in chunks:
        chunk, key = entry.chunk, (entry.prompt, entry.chunk.index)
        known = joined.get(key)
        if known is not None:
            text, tokens = known.text + chunk.text, known.tokens + chunk.tokens
            chunk = replace(chunk, text=text, tokens=tokens)
        joined[key] = chunk
    return [PromptChunk(prompt, chunk) for (prompt, _), chunk in joined.items()]
