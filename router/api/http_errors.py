"""Errors as OpenAI's clients read them: a status, headers, and a body that names the field."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvferry.errors import ErrorKind, InvalidInput, KvferryError, UnknownModel, retry_after_s

if TYPE_CHECKING:
    from collections.abc import Mapping

    from router.api.openai_shapes import ErrorBody

_TYPES: Mapping[ErrorKind, str] = {
    ErrorKind.OVERLOADED: "rate_limit_error",
    ErrorKind.UNAVAILABLE: "service_unavailable_error",
    ErrorKind.DEADLINE: "timeout_error",
    ErrorKind.CANCELLED: "request_cancelled_error",
    ErrorKind.INTERNAL: "server_error",
}
_INVALID_REQUEST = "invalid_request_error"


class HttpRefusal(Exception):
    """A request that HTTP itself has words for: no such path, too large, no JSON."""

    def __init__(
        self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = dict(headers or {})


class FieldNames:
    """The router's names of fields to those of a body: `sampling.top_p` to `top_p`."""

    def __init__(self, names: Mapping[str, str]) -> None:
        """A name stands for its parts too: `text` also for `text[3]`."""
        longest_first = sorted(names.items(), key=lambda entry: len(entry[0]), reverse=True)
        self._names = tuple(longest_first)

    def client_name(self, field: str) -> str:
        """As the client knows it."""
        for ours, theirs in self._names:
            rest = field[len(ours) :]
            if field.startswith(ours) and not rest[:1].isalnum() and rest[:1] != "_":
                return theirs + rest
        return field.removeprefix("sampling.")


NO_NAMES = FieldNames({})


def error_body(error: KvferryError | HttpRefusal, names: FieldNames = NO_NAMES) -> ErrorBody:
    """OpenAI's form."""
    if isinstance(error, HttpRefusal):
        return _body(str(error), _INVALID_REQUEST, None, error.code)
    kind = _TYPES.get(error.kind, _INVALID_REQUEST)
    if isinstance(error, InvalidInput):
        param = names.client_name(error.field)
        return _body(f"{param}: {error.problem}", kind, param, error.kind.value)
    if isinstance(error, UnknownModel):
        return _body(str(error), kind, "model", "model_not_found")
    if error.kind is ErrorKind.UNAUTHENTICATED:
        return _body(str(error), kind, None, "invalid_api_key")
    return _body(str(error), kind, None, error.kind.value)


def error_status(error: KvferryError | HttpRefusal) -> int:
    """The HTTP status."""
    return error.status if isinstance(error, HttpRefusal) else error.status.http


def error_headers(error: KvferryError | HttpRefusal) -> dict[str, str]:
    """When to try again, for errors that pass; what to show, for callers without a key."""
    if isinstance(error, HttpRefusal):
        return error.headers
    if error.kind is ErrorKind.UNAUTHENTICATED:
        return {"WWW-Authenticate": "Bearer"}
    wait_s = retry_after_s(error)
    if wait_s is None:
        return {}
    # The standard's unit is whole seconds; OpenAI's clients read the finer header first.
    return {
        "Retry-After": str(max(1, math.ceil(wait_s))),
        "Retry-After-Ms": str(max(1, round(1000 * wait_s))),
    }


def _body(message: str, kind: str, param: str | None, code: str | None) -> ErrorBody:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
