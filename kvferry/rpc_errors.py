"""Ends a gRPC call with the status of `errors.STATUS`, and a fault of ours with INTERNAL."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

import grpc

from kvferry.errors import InternalError, KvferryError, retry_after_s

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_log = logging.getLogger(__name__)

RETRY_PUSHBACK_KEY = "grpc-retry-pushback-ms"
"""gRPC's own trailing metadata for "try again after"; its clients' retry policies read it."""


@contextlib.asynccontextmanager
async def status_of_errors(context: Any) -> AsyncIterator[None]:
    """The outermost frame of every handler."""
    try:
        yield
    except KvferryError as error:
        failure = error
    except asyncio.CancelledError:
        if is_task_cancelled():
            raise  # The client is gone.
        # Something awaited was cancelled, not this call: gRPC would leave the client waiting.
        _log.exception("a call was ended by a cancellation that was not its own")
        failure = InternalError("a fault of the server; its log has the details")
    except Exception:  # noqa: BLE001 - the handler's outermost frame; ends the call
        _log.exception("a call failed for a fault of ours")
        failure = InternalError("a fault of the server; its log has the details")
    else:
        return
    await abort(context, failure)


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
