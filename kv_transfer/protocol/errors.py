"""What the protocol refuses."""

from __future__ import annotations

from kvferry.errors import ErrorKind, KvferryError


class IllegalEvent(KvferryError):
    """No transition leads out of this state with this event. Nothing has changed."""

    kind = ErrorKind.INTERNAL

    def __init__(self, what: str, state: str, event: str) -> None:
        super().__init__(f"{what}: {event} is illegal in state {state}")
        self.state = state
        self.event = event


class PromptRefused(KvferryError):
    """A worker has said that it can never serve this prompt; no other will."""

    kind = ErrorKind.INVALID_INPUT


class BadMessage(KvferryError):
    """A message contradicts what was agreed before. Nothing has changed."""

    kind = ErrorKind.INTERNAL
