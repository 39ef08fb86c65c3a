"""Every error a caller can see, with its status in one table.

`assert` states a bug of ours; these classes state bad input and operating trouble.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterable


class ErrorKind(Enum):
    """What went wrong, from the caller's point of view."""

    INVALID_INPUT = "invalid_input"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    ALREADY_EXISTS = "already_exists"
    OVERLOADED = "overloaded"
    UNAVAILABLE = "unavailable"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Status:
    """How an error kind reads on each front door. `grpc` is the name of a `grpc.StatusCode`."""

    grpc: str
    http: int
    retryable: bool


STATUS: dict[ErrorKind, Status] = {
    ErrorKind.INVALID_INPUT: Status("INVALID_ARGUMENT", 400, retryable=False),
    ErrorKind.UNAUTHENTICATED: Status("UNAUTHENTICATED", 401, retryable=False),
    ErrorKind.FORBIDDEN: Status("PERMISSION_DENIED", 403, retryable=False),
    ErrorKind.NOT_FOUND: Status("NOT_FOUND", 404, retryable=False),
    ErrorKind.ALREADY_EXISTS: Status("ALREADY_EXISTS", 409, retryable=False),
    ErrorKind.OVERLOADED: Status("RESOURCE_EXHAUSTED", 429, retryable=True),
    ErrorKind.UNAVAILABLE: Status("UNAVAILABLE", 503, retryable=True),
    ErrorKind.DEADLINE: Status("DEADLINE_EXCEEDED", 504, retryable=True),
    ErrorKind.CANCELLED: Status("CANCELLED", 499, retryable=False),
    ErrorKind.INTERNAL: Status("INTERNAL", 500, retryable=False),
}


class KvferryError(Exception):
    """Base of the errors that may reach a caller."""

    kind: ClassVar[ErrorKind] = ErrorKind.INTERNAL

    @property
    def status(self) -> Status:
        """The row of `STATUS` for this error."""
        return STATUS[self.kind]

    def __reduce__(self) -> tuple[Any, ...]:
        """Between processes: what it is, not what made it, which differs from class to class."""
        return _restored, (type(self), self.args, self.__dict__)


def _restored(
    kind: type[KvferryError], arguments: tuple[Any, ...], fields: dict[str, Any]
) -> KvferryError:
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(fields)
    return error


class InvalidInput(KvferryError):
    """A field of the request has a value we cannot serve."""

    kind = ErrorKind.INVALID_INPUT

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class ConfigError(InvalidInput):
    """The configuration cannot be used; `field` is the dotted name of the setting."""


class Unauthenticated(KvferryError):
    """The caller shows no key, or none that is known."""

    kind = ErrorKind.UNAUTHENTICATED


class Forbidden(KvferryError):
    """The caller is known and may not do this."""

    kind = ErrorKind.FORBIDDEN


_NAMES_CHARACTERS_MAX = 400
"""gRPC carries 8 KiB of an error's text, in which a character may take 12 bytes."""


class UnknownModel(KvferryError):
    """The request names a model this cluster does not serve."""

    kind = ErrorKind.NOT_FOUND

    def __init__(self, asked: str, *served: str) -> None:
        names = ", ".join(map(repr, served))
        if len(names) > _NAMES_CHARACTERS_MAX:
            names = f"{names[:_NAMES_CHARACTERS_MAX]}... ({len(served)} models)"
        super().__init__(f"model: {asked!r} is not served here; this cluster serves {names}")


class UnknownRequest(KvferryError):
    """Nothing is known of a request of this id: it never came, or is forgotten by now."""

    kind = ErrorKind.NOT_FOUND

    def __init__(self, name: str) -> None:
        super().__init__(f"no request {name[:_NAMES_CHARACTERS_MAX]!r} is remembered here")


class UnknownWorker(KvferryError):
    """The request names a worker that is not in the cluster."""

    kind = ErrorKind.NOT_FOUND

    def __init__(self, asked: str, known: Iterable[str]) -> None:
        names = ", ".join(sorted(known)) or "none"
        super().__init__(f"worker_id: {asked!r} is not in this cluster; its workers are {names}")


class DuplicateRequest(KvferryError):
    """A request with the same id is still running."""

    kind = ErrorKind.ALREADY_EXISTS

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request_id: {request_id!r} is in flight already")


class RolloutRunning(KvferryError):
    """Who is in the cluster is being changed already; only one rollout runs at a time."""

    kind = ErrorKind.ALREADY_EXISTS

    def __init__(self, revision: int) -> None:
        super().__init__(
            f"rollout: revision {revision} is being rolled out; `kvferry rollout` shows how far"
        )
        self.revision = revision

    def __reduce__(self) -> tuple[Any, ...]:
        """See `KvferryError`; its text is made of a number."""
        return RolloutRunning, (self.revision,)


class Overloaded(KvferryError):
    """A queue is full. The caller may try again after `retry_after_s`."""

    kind = ErrorKind.OVERLOADED

    def __init__(self, what: str, retry_after_s: float) -> None:
        super().__init__(f"{what}; retry after {retry_after_s:g} s")
        self.what = what
        self.retry_after_s = retry_after_s


class WorkerUnavailable(KvferryError):
    """No worker can take the request, or the one that had it is gone."""

    kind = ErrorKind.UNAVAILABLE


class AdapterNotLoaded(WorkerUnavailable):
    """A worker is asked to compute with an adapter that it has not, or has in another version."""

    def __init__(self, asked: str, loaded: Iterable[str]) -> None:
        names = ", ".join(sorted(loaded)) or "none"
        super().__init__(f"adapter: {asked} is not loaded here; loaded: {names}")


class HandoffFailed(KvferryError):
    """The KV of a prompt did not arrive. The request may be tried again."""

    kind = ErrorKind.UNAVAILABLE


class DeadlineExceeded(KvferryError):
    """A bounded wait ended without its event."""

    kind = ErrorKind.DEADLINE


class RequestCancelled(KvferryError):
    """The caller ended the request."""

    kind = ErrorKind.CANCELLED


class InternalError(KvferryError):
    """A fault of ours; the message says what was being done."""

    kind = ErrorKind.INTERNAL


_PASSES_WITHIN_S = 1.0
"""Of errors that pass by themselves and say not when: about the time of a worker's restart."""


def retry_after_s(error: KvferryError) -> float | None:
    """When to try again, as callers are told; None: not at all, or nothing is known of it."""
    if isinstance(error, Overloaded):
        return error.retry_after_s
    return _PASSES_WITHIN_S if error.kind is ErrorKind.UNAVAILABLE else None
