"""What a call to a worker ends with, as an error of ours."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import grpc.aio

from kvferry.errors import (
    STATUS,
    DeadlineExceeded,
    ErrorKind,
    InternalError,
    InvalidInput,
    KvferryError,
    Overloaded,
    WorkerUnavailable,
)
from kvferry.rpc_errors import RETRY_PUSHBACK_KEY, is_task_cancelled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvferry.membership import WorkerInfo

_RETRY_AFTER_DEFAULT_S = 1.0


@contextlib.contextmanager
def errors_of(info: WorkerInfo) -> Iterator[None]:
    """Make an error of ours of whatever a call to a worker ends with.

    A channel that is closed, or a call that is, cancels the wait for it and not the task that
    waits. Let through, that would look to everybody above as if the client had gone away.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error, info) from error
    except asyncio.InvalidStateError as error:
        # What gRPC says of a write to a call that has just ended.
        raise connection_closed(info) from error
    except asyncio.CancelledError as error:
        if is_task_cancelled():
            raise
        raise connection_closed(info) from error


def connection_closed(info: WorkerInfo) -> WorkerUnavailable:
    """The error of whoever still waited for it."""
    return WorkerUnavailable(f"the connection to worker {info.worker_id} was closed")


def error_from_rpc(error: grpc.aio.AioRpcError, info: WorkerInfo) -> KvferryError:
    """The error a worker's failed call stands for.

    Not its words alone: a client must be able to see which worker failed.
    """
    text = f"worker {info.worker_id}: {error.details() or error.code().name}"
    match _KIND_OF_CODE.get(error.code().name):
        case ErrorKind.OVERLOADED:
            return Overloaded(text, _retry_after_s(error))
        case ErrorKind.UNAVAILABLE:
            return WorkerUnavailable(text)
        case ErrorKind.DEADLINE:
            return DeadlineExceeded(text)
        case ErrorKind.INVALID_INPUT:
            return InvalidInput("request", text)
        case _:
            return InternalError(text)


_KIND_OF_CODE = {status.grpc: kind for kind, status in STATUS.items()} | {
    # A server that shuts down ends its calls with this; the request itself was not ended.
    "CANCELLED": ErrorKind.UNAVAILABLE,
}


def _retry_after_s(error: grpc.aio.AioRpcError) -> float:
    for key, value in error.trailing_metadata() or ():
        if key == RETRY_PUSHBACK_KEY and str(value).isdigit():
            return int(value) / 1000.0
    return _RETRY_AFTER_DEFAULT_S
