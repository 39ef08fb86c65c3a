"""Errors between our own processes: an error of a kind goes in, and one of that kind comes out."""

from __future__ import annotations

from kvferry.errors import (
    DeadlineExceeded,
    ErrorKind,
    InternalError,
    InvalidInput,
    KvferryError,
    Overloaded,
    WorkerUnavailable,
)
from kvferry.rpc.v1 import worker_pb2 as worker


def attempt_error_to_wire(number: int, error: KvferryError) -> worker.AttemptError:
    """`number` is that of the attempt which ends with the error."""
    message = worker.AttemptError(number=number, kind=error.kind.value, message=str(error))
    match error:
        case InvalidInput():
            message.field, message.message = error.field, error.problem
        case Overloaded():
            message.message, message.retry_after_s = error.what, error.retry_after_s
        case _:
            pass
    return message


def error_from_wire(message: worker.AttemptError, worker_id: str) -> KvferryError:
    """What a router makes of it. Its words say which worker failed, so that a client can see it.

    `RequestCancelled` becomes `WorkerUnavailable`: a router that cancels an attempt does not wait
    for its end, so it was the worker that gave up. What only another version knows is a fault.
    """
    text = f"worker {worker_id}: {message.message}"
    match message.kind:
        case ErrorKind.OVERLOADED.value:
            return Overloaded(text, message.retry_after_s)
        case ErrorKind.UNAVAILABLE.value | ErrorKind.CANCELLED.value:
            return WorkerUnavailable(text)
        case ErrorKind.DEADLINE.value:
            return DeadlineExceeded(text)
        case ErrorKind.INVALID_INPUT.value:
            # Validated at the router already, but only the worker knows what its memory holds.
            return InvalidInput(message.field, text)
        case _:
            return InternalError(text)
