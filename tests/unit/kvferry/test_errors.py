from __future__ import annotations

import pickle

import grpc
import pytest

from kvferry import errors


@pytest.mark.parametrize("kind", list(errors.ErrorKind))
def test_each_kind_has_a_status_that_grpc_knows(kind):
    status = errors.STATUS[kind]
    assert status.grpc in grpc.StatusCode.__members__
    assert 400 <= status.http <= 599


@pytest.mark.parametrize(
    ("error", "kind", "retryable"),
    [
        (errors.InvalidInput("prompt", "is empty"), errors.ErrorKind.INVALID_INPUT, False),
        (errors.ConfigError("cache.rows", "is 0"), errors.ErrorKind.INVALID_INPUT, False),
        (errors.UnknownModel("a", "b"), errors.ErrorKind.NOT_FOUND, False),
        (errors.DuplicateRequest("r"), errors.ErrorKind.ALREADY_EXISTS, False),
        (errors.Overloaded("queue full", 1.5), errors.ErrorKind.OVERLOADED, True),
        (errors.WorkerUnavailable("gone"), errors.ErrorKind.UNAVAILABLE, True),
        (errors.HandoffFailed("gone"), errors.ErrorKind.UNAVAILABLE, True),
        (errors.DeadlineExceeded("late"), errors.ErrorKind.DEADLINE, True),
        (errors.RequestCancelled("bye"), errors.ErrorKind.CANCELLED, False),
        (errors.InternalError("bug"), errors.ErrorKind.INTERNAL, False),
    ],
)
def test_each_error_has_its_kind(error, kind, retryable):
    assert error.kind is kind
    assert error.status.retryable is retryable


def test_an_input_error_names_its_field_first():
    assert str(errors.InvalidInput("sampling.top_p", "is 2")) == "sampling.top_p: is 2"


@pytest.mark.parametrize(
    "error",
    [
        errors.ConfigError("cache.rows", "is 0"),
        errors.UnknownWorker("a", ["b"]),
        errors.Overloaded("queue full", 1.5),
        errors.WorkerUnavailable("gone"),
    ],
)
def test_an_error_passes_between_processes(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), vars(copy)) == (str(error), vars(error))


def test_who_may_try_again_is_told_when():
    assert errors.retry_after_s(errors.Overloaded("full", 0.25)) == 0.25
    assert errors.retry_after_s(errors.WorkerUnavailable("gone")) == 1.0
    for error in (errors.DeadlineExceeded("late"), errors.InternalError("bug")):
        assert errors.retry_after_s(error) is None
