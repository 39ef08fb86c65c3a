"""Ends a gRPC call with the status of `errors.STATUS`, and a fault of ours with INTERNAL."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import grpc

from kvferry.errors import InternalError, KvferryError, retry_after_s

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType

_log = logging.getLogger(__name__)

RETRY_PUSHBACK_KEY = "grpc-retry-pushback-ms"
"""gRPC's own trailing metadata for "try again after"; its clients' retry policies read it."""


def status_of_errors(context: Any) -> AbstractAsyncContextManager[None]:
    """The outermost frame of every handler."""
    return _StatusOfErrors(context)


class _StatusOfErrors:
    __slots__ = ("_context",)

    def __init__(self, context: Any) -> None:
        self._context = context

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        failure = None if error is None else _failure_of(error)
        if error is None or failure is None:
            return False
        # gRPC keeps what the last call was aborted with until the next call comes, and with it
        # every frame that is found from here: the request, its prompt and its answer.
        del trace
        _forget_frames(error)
        await abort(self._context, failure)
        return True


def _failure_of(error: BaseException) -> KvferryError | None:
    """What the client is told; None if nobody is there to be told."""
    if isinstance(error, KvferryError):
        return error
    if isinstance(error, asyncio.CancelledError):
        if is_task_cancelled():
            return None  # The client is gone.
        # Something awaited was cancelled, not this call: gRPC would leave the client waiting.
        what = "a call was ended by a cancellation that was not its own"
    elif isinstance(error, Exception):
        what = "a call failed for a fault of ours"
    else:
        return None
    _log.error(what, exc_info=error)
    return InternalError("a fault of the server; its log has the details")


def _forget_frames(error: BaseException) -> None:
    error.__traceback__ = error.__cause__ = error.__context__ = None


async def abort(context: Any, error: KvferryError) -> None:
    """End the call; an error that passes tells gRPC's own retry policies when to try again."""
    wait_s = retry_after_s(error)
    trailing = () if wait_s is None else ((RETRY_PUSHBACK_KEY, str(round(1000 * wait_s))),)
    await context.abort(grpc.StatusCode[error.status.grpc], str(error), trailing)


def is_task_cancelled() -> bool:
    """Whether a `CancelledError` at hand is meant for the task that runs, and not for something
    that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
