"""Errors between our processes keep their kind, and say which worker they come from."""

from __future__ import annotations

import pytest

from kvferry.error_wire import attempt_error_to_wire, error_from_wire
from kvferry.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    HandoffFailed,
    InternalError,
    InvalidInput,
    KvferryError,
    Overloaded,
    RequestCancelled,
    WorkerUnavailable,
)
from kvferry.rpc.v1 import worker_pb2


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InvalidInput("prompt", "is too long"), InvalidInput("prompt", "worker w: is too long")),
        (Overloaded("full", 2.5), Overloaded("worker w: full", 2.5)),
        (WorkerUnavailable("stops"), WorkerUnavailable("worker w: stops")),
        (HandoffFailed("no KV"), WorkerUnavailable("worker w: no KV")),
        (DeadlineExceeded("late"), DeadlineExceeded("worker w: late")),
        (RequestCancelled("gone"), WorkerUnavailable("worker w: gone")),
        (InternalError("a bug"), InternalError("worker w: a bug")),
        (
            DuplicateRequest("r"),
            InternalError("worker w: request_id: 'r' is in flight already"),
        ),
    ],
)
def test_an_error_comes_out_as_what_a_router_makes_of_it(
    error: KvferryError, expected: KvferryError
) -> None:
    message = attempt_error_to_wire(3, error)
    assert message.number == 3
    made = error_from_wire(message, "w")
    assert (type(made), str(made)) == (type(expected), str(expected))
    assert made.status == expected.status
    if isinstance(made, InvalidInput):
        assert made.field == "prompt"
    if isinstance(made, Overloaded):
        assert made.retry_after_s == 2.5


def test_a_kind_of_another_version_is_a_fault() -> None:
    made = error_from_wire(worker_pb2.AttemptError(kind="tired", message="?"), "w")
    assert type(made) is InternalError
