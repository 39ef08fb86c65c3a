"""What a sink's host hears of a handoff that failed."""

from __future__ import annotations

from kv_transfer.protocol.errors import PromptRefused
from kvferry.errors import ErrorKind, HandoffFailed, KvferryError, Overloaded

_RETRY_AFTER_S = 1.0
"""Hint to clients when the source's queue is full; it does not say how long that will last."""


def fetch_failure(reason: str, kind: ErrorKind | None) -> KvferryError:
    """By default: that another try may succeed."""
    match kind:
        case ErrorKind.OVERLOADED:
            # The source's text ends with a hint of its own.
            return Overloaded(reason.partition("; retry after ")[0], _RETRY_AFTER_S)
        case ErrorKind.INVALID_INPUT:
            return PromptRefused(reason)
        case _:
            return HandoffFailed(reason)
